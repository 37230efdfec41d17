"""Ring attention with a score_mod: the passes of ring.py under an autograd function of their own.

A torch.library op takes tensors and numbers, not a function, so this is none: a compiler breaks its graph here, and
selective checkpointing computes it again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.first_order import first_order_only
from ..comm.ring import Ring
from ..errors import ScoreModChanged
from ..kernels import KERNELS, Params, ScoreMod, text_of
from ..sharding.plan import Plan, Tables
from ..traffic import traffic_of
from .backward import gradients
from .op import count_attention, forward


class _State(NamedTuple):
    """What a function was in the forward. It is run again in the backward, and may have changed: an attribute that it
    reads, a list that it takes a tensor from, the tensor itself."""

    mod: ScoreMod
    text: str
    versions: list[int]

    @classmethod
    def of(cls, mod: ScoreMod) -> _State:
        return cls(mod, text_of(mod), [_version(x) for x in (*mod.captured, *mod.fixed)])

    def check(self) -> None:
        """
        Raises:
            ScoreModChanged: the function is another one by now.
        """
        then, name = self.mod, self.mod.name
        now = _State.of(ScoreMod.of(then.function, then.device or torch.device("cpu"), then.deterministic))
        pairs = list(zip((*then.captured, *then.fixed), (*now.mod.captured, *now.mod.fixed), strict=False))
        for number, (was, tensor) in enumerate(pairs):
            if was is tensor and now.versions[number] != self.versions[number]:
                raise ScoreModChanged(name, f"a tensor of shape {tuple(was.shape)} that it uses was written")
        if now.text != self.text:
            raise ScoreModChanged(name, "it computes something else")
        if len(now.versions) != len(self.versions) or not all(_stands_for(tensor, was) for was, tensor in pairs):
            raise ScoreModChanged(name, "it uses other tensors")


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _stands_for(now: Tensor, then: Tensor) -> bool:
    """A function may have made a tensor anew, with the same numbers."""
    if now is then:
        return True
    alike = now.shape == then.shape and now.dtype == then.dtype and now.device == then.device
    return not then.requires_grad and alike and torch.equal(now, then)


class _Job(NamedTuple):
    plan: Plan
    params: Params
    kernel: str
    backward: str
    heads_per_gather: int
    traffic: str


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_scored(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, params: Params, *, kernel: str, backward: str = "ring",
    heads_per_gather: int | None = None, traffic: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `ring.attend`, with the ``score_mod`` of ``params``; differentiable in the tensors that it captures, too."""
    assert params.score_mod is not None, "without a score_mod there is the op"
    job = _Job(plan, params, kernel, backward, heads_per_gather or 0, traffic)
    answer: tuple[Tensor, Tensor] = _Scored.apply(q, k, v, params.sinks, job, *params.score_mod.captured)  # type: ignore[no-untyped-call]
    return answer


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: _Job, *captured: Tensor
    ) -> tuple[Tensor, Tensor]:
        count_attention()
        plan, params = job.plan, _with(job.params, sinks, captured, [False] * len(captured))
        traffic = traffic_of(Ring(plan.ring), q.device, job.traffic)
        tables = Tables.of(plan.tiles, plan.stops, traffic.ring.size)
        with torch.autocast(q.device.type, enabled=False):
            out, lse = forward(traffic, KERNELS[job.kernel], q, k, v, tables, params, job.heads_per_gather)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *captured)
        ctx.job = job
        assert job.params.score_mod is not None
        ctx.state = _State.of(job.params.score_mod) if any(ctx.needs_input_grad) else None
        return out, lse

    @staticmethod
    @first_order_only("ring attention with a score_mod")
    def backward(ctx: Any, saved: tuple[Any, ...], dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, *captured = saved
        job: _Job = ctx.job
        ctx.state.check()
        params = _with(job.params, sinks, captured, ctx.needs_input_grad[5:])
        mod = params.score_mod
        assert mod is not None
        sums = mod.new_gradients()
        traffic = traffic_of(Ring(job.plan.ring), q.device, job.traffic)
        tables = Tables.of(job.plan.tiles, job.plan.stops, traffic.ring.size)
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv, dsinks = gradients(
                traffic, KERNELS[job.kernel], dout, q, k, v, out, lse, tables, params, job.backward,
                job.heads_per_gather, sums,
            )  # fmt: skip
        rest = [mod.gradient(sums, number) for number in range(len(captured))]
        return (dq, dk, dv, None if sinks is None else dsinks, None, *rest)


def _with(params: Params, sinks: Tensor | None, captured: Any, require_grad: Any) -> Params:
    """The parameters with the tensors that autograd handed over in place of those that were there."""
    assert params.score_mod is not None
    return replace(params, sinks=sinks, score_mod=params.score_mod.with_values(captured, require_grad))
