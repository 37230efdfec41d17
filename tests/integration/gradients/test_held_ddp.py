"""DDP in a program's own module, and a program's own kind of DDP: steps of one process, as under DDP itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn import errors
from hf_ring_attn.testing import relative_error
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.tiny_models import tiny
from tests.integration.gradients import test_ddp

Weights = dict[str, torch.Tensor]


class Holder(nn.Module):
    """A program's module that holds DDP."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__()
        self.net = DistributedDataParallel(model, **options)

    @property
    def module(self) -> Any:
        return self.net.module

    def no_sync(self) -> Any:
        return self.net.no_sync()

    def forward(self, **inputs: Any) -> Any:
        return self.net(**inputs)


class OwnKind(DistributedDataParallel):
    """A program's kind of DDP."""


class OwnForward(DistributedDataParallel):
    """One with a forward of its own."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return super().forward(*args, **inputs)  # type: ignore[no-untyped-call]


KINDS = {kind.__name__: kind for kind in (Holder, OwnKind, OwnForward)}


def run(kind: str, name: str) -> tuple[Weights, list[float]]:
    with mock.patch.object(test_ddp, "DistributedDataParallel", KINDS[kind]):
        return test_ddp.run(name, 2)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", ["switches_without_sync", "thaws", "freezes", "two_backwards"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_steps_as_one_process(ranks: Ranks, kind: str, name: str) -> None:
    """A last step was each rank's own, without an error, and earlier ones were refused a batch late."""
    want, norms = test_ddp.run(name, 1)
    for got, found in ranks(2).run(run, kind, name):
        assert found == pytest.approx(norms, rel=1e-5)
        assert max(relative_error(got[one], x) for one, x in want.items()) < 1e-5


class Past(Holder):
    """One that calls the model inside DDP."""

    def forward(self, **inputs: Any) -> Any:
        return self.net.module(**inputs)


class WithoutSync(Holder):
    """One whose forward is in no_sync."""

    def forward(self, **inputs: Any) -> Any:
        with self.net.no_sync():
            return self.net(**inputs)


def one_step(kind: Callable[..., Any] | None) -> Weights:
    model: Any = tiny("llama", None if kind is None else "ring_fp32").train()
    called = model if kind is None else kind(model)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), tokens(23)
    with nullcontext() if kind is None else hf_ring_attn.shard(batch) as sharded:
        called(**(batch if sharded is None else sharded.inputs)).loss.backward()
    optimizer.step()
    return {name: x.detach() for name, x in model.named_parameters()}


def test_a_call_of_the_model_inside_is_averaged(ranks: Ranks) -> None:
    want = one_step(None)
    for got in ranks(2).run(one_step, Past):
        assert max(relative_error(got[name], x) for name, x in want.items()) < 1e-5


def refusal(program: Callable[..., Any], *given: Any) -> str:
    try:
        program(*given)
    except errors.RanksDiffer as error:
        return str(error)
    return ""


def synced_first() -> None:
    """Two steps' gradients in one batch's context, the second in no_sync."""
    model: Any = DistributedDataParallel(tiny("llama", "ring_fp32").train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hf_ring_attn.shard(tokens(23)) as sharded:
        model(**sharded.inputs).loss.backward()
        with model.no_sync():
            model(**sharded.inputs).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("program", [(one_step, WithoutSync), (synced_first,)], ids=["inside", "second"])
def test_a_step_after_a_last_backward_in_no_sync_is_refused(ranks: Ranks, program: tuple[Any, ...]) -> None:
    """Only the mode at the first call of a batch's outermost module was looked at."""
    assert all("no_sync" in text for text in ranks(2).run(refusal, *program))
