"""Processes that a program forks from a rank: they compute alone, and use of the rank's ring is refused.

They waited for ever, since a fork has no threads of gloo, and the rank waited for them.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import hf_ring_attn
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.tiny_models import tiny

SECONDS = 20


def forked(function: Callable[[], object]) -> str:
    """What ``function`` returns or raises in a fork of this process, as text; "" if the fork does not end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(function())
        except Exception as error:  # noqa: BLE001 - the test judges the text, whatever it is
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        atexit._run_exitfuncs()  # as at a program's end
        os._exit(0)
    os.close(write)
    ends = time.monotonic() + SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return ""
        time.sleep(0.01)
    with os.fdopen(read) as told:
        return told.read()


def fork_of_a_rank(inside: bool, shards: bool) -> tuple[str, float, float]:
    """What a fork of each rank tells, the loss of whole rows, and the loss of the ring's next batch."""
    model: Any = tiny("llama", "ring_fp32")
    with ExitStack() as context:
        if inside:
            sharded = context.enter_context(hf_ring_attn.shard(tokens(40)))
            model(**sharded.inputs)
        told = forked(lambda: hf_ring_attn.shard(tokens(23)) if shards else model(**tokens(23)).loss.item())
    with hf_ring_attn.shard(tokens(23)) as sharded:
        loss = sharded.reduce(model(**sharded.inputs).loss)
    return told, model(**tokens(23)).loss.item(), loss.item()


@pytest.mark.parametrize("inside", [False, True])
def test_a_fork_that_shards_is_refused(ranks: Ranks, inside: bool) -> None:
    for told, whole, loss in ranks(2).run(fork_of_a_rank, inside, True):
        assert told.startswith("ForkedProcess: a process that was forked from a rank")
        assert loss == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("inside", [False, True])
def test_a_fork_computes_whole_rows(ranks: Ranks, inside: bool) -> None:
    """Inside of a batch's context its model was taken for one of that batch."""
    for told, whole, loss in ranks(2).run(fork_of_a_rank, inside, False):
        assert float(told) == whole
        assert loss == pytest.approx(whole, rel=1e-5)
