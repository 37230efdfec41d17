"""Schedulers that accelerate prepared: the learning rates of one process, whichever way a program counts its steps."""

from __future__ import annotations

import functools
import json
import math
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml  # type: ignore[import-untyped]  # it has no types
from accelerate import ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import TorchDynamoPlugin
from torch.optim import lr_scheduler
from transformers import get_scheduler

from hf_ring_attn import errors
from hf_ring_attn.integration.context import batch_context
from hf_ring_attn.integration.hosts import schedulers
from hf_ring_attn.integration.hosts.rings_as_processes import RingsAsProcesses
from tests.helpers.jobs.states import of_two_gpus

STEPS, WARMUP = 12, 3
Make = Callable[[Any, int, int], Any]
"""A scheduler of an optimizer, given how often it is to step for each batch, as a program knows it, and STEPS."""


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(schedulers.ProcessCount, "lost", False)
    monkeypatch.setattr(schedulers.ProcessCount, "shares", set())
    return of_two_gpus(monkeypatch)


def processes(process: dict[str, Any], rings: int) -> Any:
    """`accelerator.num_processes`, of so many rings of two."""
    process["num_processes"] = 2 * rings
    config = ParallelismConfig(cp_size=2, dp_replicate_size=rings, cp_backend="ring")
    state = AcceleratorState(parallelism_config=config, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True)
    assert type(PartialState().num_processes) is type(state.num_processes) is schedulers.ProcessCount
    return state.num_processes


def optimizer() -> Any:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)


def rates(schedule: Any, made: Any) -> list[float]:
    made.step()
    found = []
    for _ in range(STEPS):
        found += schedule.get_last_lr()
        schedule.step()
    return found


def prepared(schedule: Any, split: bool = False) -> Any:
    return AcceleratedScheduler(schedule, SimpleNamespace(step_was_skipped=False), split_batches=split)


def own(made: Any, times: int, steps: int) -> Any:
    total = steps * times
    return lr_scheduler.LambdaLR(made, lambda step: 1 - step / total)


def sequential(made: Any, times: int, steps: int) -> Any:
    first = lr_scheduler.LinearLR(made, 0.1, 1.0, total_iters=WARMUP * times)
    second = lr_scheduler.CosineAnnealingLR(made, T_max=(steps - WARMUP) * times)
    return lr_scheduler.SequentialLR(made, [first, second], milestones=[WARMUP * times])


def of_transformers(name: str, made: Any, times: int, steps: int, **more: Any) -> Any:
    return get_scheduler(name, made, num_warmup_steps=WARMUP * times, num_training_steps=steps * times, **more)


def milestones(made: Any, times: int, steps: int) -> Any:
    return lr_scheduler.MultiStepLR(made, [2 * times, 5 * times])


KINDS: dict[str, Make] = {
    **{name: functools.partial(of_transformers, name) for name in ("linear", "cosine", "polynomial")},
    "restarts": functools.partial(of_transformers, "cosine_with_restarts", scheduler_specific_kwargs={"num_cycles": 2}),
    "a ratio": lambda made, times, steps: get_scheduler("linear", made, int(steps * times * 0.25), steps * times),
    "a rounded ratio": lambda made, times, steps: get_scheduler(
        "cosine", made, math.ceil(steps * times * 0.25), steps * times
    ),
    "no warmup": lambda made, times, steps: get_scheduler("linear", made, 0 * times, steps * times),
    "a function": own,
    "one after the other": sequential,
    "milestones": milestones,
    "StepLR": lambda made, times, steps: lr_scheduler.StepLR(made, 4 * times),
    "CosineAnnealingLR": lambda made, times, steps: lr_scheduler.CosineAnnealingLR(made, steps * times),
}
COUNTED: dict[str, Callable[[Any, int], Any]] = {
    "follows accelerate's rule": lambda number, _: number,
    "counts batches": lambda _, rings: rings,  # its loader was not prepared yet: it has all batches of all rings
}


@pytest.mark.parametrize("rings", [1, 2])
@pytest.mark.parametrize("program", COUNTED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.turns
def test_a_scheduler_has_the_rates_of_one_process(process: dict[str, Any], kind: str, program: str, rings: int) -> None:
    number = processes(process, rings)
    made = optimizer()
    schedule = KINDS[kind](made, COUNTED[program](number, rings), STEPS)
    alone = optimizer()
    assert rates(prepared(schedule), made) == pytest.approx(rates(KINDS[kind](alone, 1, STEPS), alone), abs=1e-12)
    pickle.loads(pickle.dumps(schedule.state_dict()))
    assert not [x for x in schedule.state_dict().values() if isinstance(x, schedulers.ProcessCount)]


@pytest.mark.parametrize("rings", [1, 2])
@pytest.mark.parametrize("multiplied", [True, False])
def test_split_batches_have_the_rates_of_one_process(process: dict[str, Any], multiplied: bool, rings: int) -> None:
    """A multiplied schedule took as many times as long as there are processes, silently."""
    number = processes(process, rings)
    made, alone = optimizer(), optimizer()
    schedule = own(made, number if multiplied else 1, STEPS)
    assert rates(prepared(schedule, split=True), made) == pytest.approx(rates(own(alone, 1, STEPS), alone))


@pytest.mark.parametrize("multiplied", [True, False])
def test_a_scheduler_that_ends_does_not_go_on(process: dict[str, Any], multiplied: bool) -> None:
    number = processes(process, 2)
    made = optimizer()
    schedule = prepared(lr_scheduler.OneCycleLR(made, 1.0, total_steps=2 * number if multiplied else 5))
    made.step()
    for _ in range(6):
        schedule.step()


@pytest.mark.parametrize("split", [False, True])
def test_a_scheduler_waits_for_its_optimizer_and_for_split_batches(process: dict[str, Any], split: bool) -> None:
    processes(process, 2)
    made = optimizer()
    schedule = prepared(lr_scheduler.LambdaLR(made, float), split)
    made.step()
    schedule.step()
    assert schedule.get_last_lr() == [1.0 if split else 2.0]
    schedule.optimizers[0].step_was_skipped = True
    schedule.step()
    assert schedule.get_last_lr() == [1.0 if split else 2.0]


def one_not_multiplied(made: Any, times: int, steps: int) -> Any:
    """Python gave the numbers of the second the memory of the first's, by which they counted as read."""
    return lr_scheduler.ChainedScheduler([own(made, times, steps), own(made, 1, steps)])


UNCLEAR: dict[str, Make] = {
    "one of two is not multiplied": one_not_multiplied,
    "warmup is not multiplied": lambda made, n, steps: get_scheduler("linear", made, WARMUP, steps * n),
    "steps are not multiplied": lambda made, n, steps: get_scheduler("linear", made, WARMUP * n, steps),
    "a share of a product": lambda made, n, steps: get_scheduler("linear", made, int(0.25 * (steps * n)), steps * n),
    "a share that is no whole multiple": lambda made, n, steps: get_scheduler(
        "linear", made, int(steps * n * 0.3), steps * n
    ),
    "a plain product": lambda made, n, steps: get_scheduler("linear", made, 0, int(steps * n)),
    "a plain count": lambda made, n, steps: get_scheduler("linear", made, 0, steps * int(n)),
    "a division": lambda made, n, steps: get_scheduler("linear", made, 0, math.ceil(steps * n / 3)),
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_a_scheduler_that_is_not_clear_is_refused_before_its_first_step(process: dict[str, Any], kind: str) -> None:
    number = processes(process, 1)
    made = optimizer()
    schedule = prepared(UNCLEAR[kind](made, number, STEPS))
    before = schedule.get_last_lr()
    with pytest.raises(errors.UnclearScheduler, match=r"all .* by accelerator\.num_processes, or none.*prepare\(\)"):
        schedule.step()
    assert schedule.get_last_lr() == before


def test_a_plain_number_made_after_a_scheduler_is_not_the_schedulers(process: dict[str, Any]) -> None:
    """A program may write int(accelerator.num_processes) into its log before the first step."""
    number = processes(process, 1)
    made = optimizer()
    schedule = prepared(of_transformers("linear", made, 1, STEPS))
    assert f"{int(number)} processes, {number / 2:.0f} rings" == "2 processes, 1 rings"
    alone = optimizer()
    assert rates(schedule, made) == pytest.approx(rates(of_transformers("linear", alone, 1, STEPS), alone))


def test_a_stream_that_counts_rings_loses_no_count(process: dict[str, Any]) -> None:
    """A prepared IterableDataset counts rings before its scheduler is prepared, which was refused then."""
    number, made = processes(process, 1), optimizer()
    host = SimpleNamespace(num_processes=number, parallelism_config=SimpleNamespace(cp_size=2))
    assert RingsAsProcesses(host).num_processes == 1
    alone = optimizer()
    schedule = prepared(of_transformers("linear", made, 1, STEPS))
    assert rates(schedule, made) == pytest.approx(rates(of_transformers("linear", alone, 1, STEPS), alone))


def test_a_count_of_processes_is_written_as_a_number(process: dict[str, Any]) -> None:
    count = processes(process, 1)
    for dump in (yaml.safe_dump, yaml.dump, functools.partial(yaml.dump, Dumper=yaml.CSafeDumper)):
        assert dump({"processes": 2 * count}) == "processes: 4\n"
        assert dump({"share": count * 0.25}) == "share: 0.5\n"
    assert json.dumps([count, count * 0.25]) == "[2, 0.5]"


def test_a_count_of_processes_is_a_number() -> None:
    count = schedulers.ProcessCount(3)
    assert (count, count * 2, 2 * count, count + 1, 7 - count, 7 // count, 7 % count) == (3, 6, 6, 4, 4, 2, 1)
    assert isinstance((count * 5 // 2 + 1) - 1, schedulers.ProcessCount)
    assert isinstance(math.ceil(max(1, 2 * count)), schedulers.ProcessCount)
    assert torch.ones(2) * count == pytest.approx(torch.full((2,), 3.0))
    assert [*range(count)] == [0, 1, 2]
    assert f"{count} {count!r} {count:02d}" == "3 3 03"
    assert type(pickle.loads(pickle.dumps(count))) is int
    assert (count * 0.5, 0.5 * count, int(count * 1.5), round(count * 0.5, 1)) == (1.5, 1.5, 4, 1.5)
    assert type(pickle.loads(pickle.dumps(count * 0.1))) is float


class SharedOut:
    """As much of a batch that is shared out as is looked at."""

    ring = SimpleNamespace(size=2)


def test_a_scheduler_of_an_accelerate_that_does_not_know_of_the_ring_is_told_of(process: dict[str, Any]) -> None:
    """A ring over all of an Accelerator's processes, by shard() alone: it steps once for each of them, as it may have
    been made for that."""
    AcceleratorState(dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True)
    made = optimizer()
    schedule = prepared(lr_scheduler.LambdaLR(made, float))
    made.step()
    with mock.patch.object(schedulers, "say") as said:
        schedule.step()
        said.assert_not_called()
        with mock.patch.object(batch_context, "LIVE", [SharedOut()]):
            schedule.step()
    assert schedule.get_last_lr() == [4.0]
    (text,) = said.call_args.args
    assert "steps 2 times for each batch, once for each process, since accelerate does not know" in text
