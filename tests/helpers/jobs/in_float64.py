"""Runs of TRL's trainers in float64, where what a ring computes otherwise cannot hide behind rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer import dpo_trainer

from tests.helpers.jobs import (
    distillation_jobs,
    grpo_jobs,
    preference_jobs,
    sft_jobs,
    sft_pictures,
    trainer_jobs,
    whole_logits_jobs,
)
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trl_runs import Outcome


class WithoutFloat32(TorchFunctionMode):
    """Code that asks for float32 gets float64: norms, RoPE and the sums of TRL's fused head do."""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(_wide, args), **{name: _wide(x) for name, x in (kwargs or {}).items()})


class _TorchOfDPO:
    """The module torch for TRL's DPO, whose table of dtypes for the alpha-divergence has no float64."""

    def __getattr__(self, name: str) -> Any:
        return _wide(getattr(torch, name))


def _wide(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


@contextmanager
def in_float64(jobs: ModuleType, *makers: str) -> Iterator[None]:
    """Models that ``makers`` of ``jobs`` make are in float64, and so is what is computed with them."""

    def wide(backward: Callable[..., Any], *args: Any) -> Any:
        with WithoutFloat32():  # autograd leaves the mode
            return backward(*args)

    with ExitStack() as stack:
        for name in makers:
            make = getattr(jobs, name)
            stack.enter_context(mock.patch.object(jobs, name, lambda *args, make=make: make(*args).double()))
        for head in (ChunkedLogProbFunction, ChunkedDivergenceFunction):
            backward = staticmethod(partial(wide, head.backward))
            stack.enter_context(mock.patch.object(head, "backward", backward))
        stack.enter_context(WithoutFloat32())
        yield


def preferences_trained(case: preference_jobs.Case, mesh: Mesh, kind: Any = None) -> Outcome:
    with in_float64(preference_jobs, "policy", "teacher"), mock.patch.object(dpo_trainer, "torch", _TorchOfDPO()):
        return preference_jobs.trained(case, mesh, kind=kind)


def whole_logits_trained(case: whole_logits_jobs.Case, mesh: Mesh) -> Outcome:
    with in_float64(whole_logits_jobs, "model"):
        return whole_logits_jobs.trained(case, mesh)


def pictures_learnt(case: sft_jobs.Case, mesh: Mesh) -> Outcome:
    with in_float64(sft_pictures, "model"):
        return sft_jobs.trained(case, mesh)


def pictures_learnt_by_trainer(run: Run, mesh: Mesh) -> trainer_jobs.Outcome:
    with in_float64(trainer_jobs, "tiny"):
        return trainer_jobs.train(run, mesh)


def distilled(case: distillation_jobs.Case, mesh: Mesh) -> Outcome:
    with in_float64(distillation_jobs, "policy", "teacher"):
        return distillation_jobs.trained(case, mesh)


def reinforced(case: grpo_jobs.Case, mesh: Mesh, kind: Any = None) -> Outcome:
    with in_float64(grpo_jobs, "policy", "teacher"):
        return grpo_jobs.trained(case, mesh, kind=kind)
