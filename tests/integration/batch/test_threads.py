"""Other threads of a program may run models while a batch runs in the ring."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_ring_attn
from hf_ring_attn.integration.context import batch_context
from hf_ring_attn.testing import relative_error
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.tiny_models import tiny


@contextmanager
def called_in_a_thread(model: nn.Module, x: Tensor) -> Iterator[list[Tensor]]:
    """Calls a model in a thread, again and again. Yields the list of what the calls return."""
    found: list[Tensor] = []
    ends = threading.Event()

    def run() -> None:
        while not ends.wait(0.001):
            output: Any = model(x)
            found.append(getattr(output, "logits", output).detach())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        ends.set()
        thread.join()


def beside_a_thread(kind: str, in_ring: bool = True) -> tuple[Tensor, Tensor]:
    """A weight after a step, while another model runs in a thread; the last of what that returned, which is all of it.

    The other model trains, too, so ranks would compare its weights if it were one of the batch.
    """
    model: Any = tiny("llama", "ring_fp32").double().train()
    torch.manual_seed(0)
    other: nn.Module = tiny("llama", "ring_fp32") if kind == "ring_fp32" else nn.Linear(8, 8)
    x = tokens(200)["input_ids"] if kind == "ring_fp32" else torch.ones(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with called_in_a_thread(other, x) as found:
        with hf_ring_attn.shard(tokens(400)) as sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        if in_ring:
            sharded.reduce_gradients(model)
        optimizer.step()
    assert all(torch.equal(each, found[0]) for each in found)
    return model.lm_head.weight.detach(), found[-1]


@pytest.mark.parametrize("kind", ["linear", "ring_fp32"])
def test_a_model_in_another_thread_is_none_of_the_batch(ranks: Ranks, kind: str) -> None:
    """It was taken for one: its rank sent messages for it, and gloo aborted the others."""
    want, answer = beside_a_thread(kind, in_ring=False)
    for got, found in ranks(2).run(beside_a_thread, kind):
        assert relative_error(got, want) < 1e-6 and torch.equal(found, answer)


def test_a_batch_is_active_in_its_thread_and_in_those_that_python_has_not_started() -> None:
    """Autograd's run the backward of a GPU, and checkpoints in it."""
    found: list[object] = []
    done = threading.Semaphore(0)

    def look() -> None:
        found.append(batch_context.current())
        done.release()

    with hf_ring_attn.shard(tokens(8)) as sharded:
        look()
        threading.Thread(target=look).start()
        done.acquire()
        done.acquire()
        _thread.start_new_thread(look, ())
        done.acquire()
    assert found == [sharded.context, None, sharded.context]
