"""The ring waits as long as its program asked for, on a mesh whose groups have times of their own."""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs

import hf_ring_attn
from hf_ring_attn.errors import PeerLost
from hf_ring_attn.integration.context.mesh import ring_group
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import launched, trainer_of
from tests.helpers.models.tiny_models import tiny

MESH = Mesh(dp=2, cp=2)


def time_of(group: Any) -> timedelta:
    waits: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return waits


def of_an_accelerator(seconds: int | None) -> tuple[timedelta, timedelta]:
    """The ring's time, and the world's."""
    with launched(MESH):
        handlers: list[Any] = [] if seconds is None else [InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))]
        accelerator = Accelerator(kwargs_handlers=handlers)
        accelerator.prepare_model(tiny("llama", "ring_fp32"))
        return time_of(ring_group(accelerator)), time_of(dist.group.WORLD)


def of_a_trainer(seconds: int) -> timedelta:
    with launched(MESH), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(Run(why="", arguments={"ddp_timeout": seconds}), MESH, folder)
        trainer.train()
        return time_of(ring_group(trainer.accelerator))


def left_alone() -> float:
    """How long a rank waits for one that never comes."""
    with launched(MESH):
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=3))])
        accelerator.prepare_model(tiny("llama", "ring_fp32"))
        started = time.monotonic()
        if dist.get_rank() == 2:
            try:
                hf_ring_attn.shard(tokens(24))
            except PeerLost as error:
                assert "compared its batch with the other ranks" in str(error)  # noqa: PT017  it runs on a rank
                return time.monotonic() - started
        time.sleep(8)
        return 0.0


def test_a_ring_waits_as_long_as_asked(ranks: Ranks) -> None:
    assert {ring for ring, _ in ranks(4).run(of_an_accelerator, 77)} == {timedelta(seconds=77)}
    for ring, world in ranks(4).run(of_an_accelerator, None):
        assert ring == world != timedelta(minutes=30)


def test_a_ring_of_a_trainer_waits_as_long_as_asked(ranks: Ranks) -> None:
    assert ranks(4).run(of_a_trainer, 99) == [timedelta(seconds=99)] * 4


@pytest.mark.turns
def test_a_rank_that_never_comes_ends_the_wait_in_words(ranks: Ranks) -> None:
    waited = ranks(4).run(left_alone)
    assert waited[2] == pytest.approx(3, abs=2.5)
    ranks(4).close()  # its groups are broken
