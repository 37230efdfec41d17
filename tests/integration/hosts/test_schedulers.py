"""Schedulers that accelerate prepared: they step once for each ring, as accelerate has them do for each process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin

from hf_ring_attn.integration.context import batch_context
from hf_ring_attn.integration.hosts import accelerate
from tests.helpers.jobs.states import of_two_gpus


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return of_two_gpus(monkeypatch)


@pytest.mark.parametrize("rings", [1, 2])
@pytest.mark.parametrize("split", [False, True])
def test_a_scheduler_steps_once_for_each_ring(process: dict[str, Any], rings: int, split: bool) -> None:
    """Once a step in a ring, as in one process; rings are counted as accelerate counts processes without one."""
    process["num_processes"] = 2 * rings
    AcceleratorState(
        parallelism_config=ParallelismConfig(cp_size=2, dp_replicate_size=rings, cp_backend="ring"),
        dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True,
    )  # fmt: skip
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    linked: Any = SimpleNamespace(step_was_skipped=False)
    every = torch.optim.lr_scheduler.LambdaLR(optimizer, float)
    schedule = AcceleratedScheduler(every, linked, split_batches=split)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9)
    ending = AcceleratedScheduler(cycle, linked, split_batches=split)
    optimizer.step()
    for turn in range(1, 7):
        schedule.step()
        assert schedule.get_last_lr() == [float(turn if split else turn * rings)]
        ending.step()  # it must not go on past its end
    linked.step_was_skipped = True
    schedule.step()
    assert schedule.get_last_lr() == [float(6 if split else 6 * rings)]


class SharedOut:
    """As much of a batch that is shared out as is looked at."""

    ring = SimpleNamespace(size=2)


def test_a_scheduler_of_an_accelerate_that_does_not_know_of_the_ring_is_told_of(process: dict[str, Any]) -> None:
    """A ring over all of an Accelerator's processes, by shard() alone: it steps once for each of them, as it may have
    been made for that."""
    AcceleratorState(dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    every = torch.optim.lr_scheduler.LambdaLR(optimizer, float)
    schedule = AcceleratedScheduler(every, SimpleNamespace(step_was_skipped=False), split_batches=False)
    optimizer.step()
    with mock.patch.object(accelerate, "say") as said:
        schedule.step()
        said.assert_not_called()
        with mock.patch.object(batch_context, "LIVE", [SharedOut()]):
            schedule.step()
    assert schedule.get_last_lr() == [4.0]
    (text,) = said.call_args.args
    assert "steps 2 times for each batch, once for each process, since accelerate was not told" in text
