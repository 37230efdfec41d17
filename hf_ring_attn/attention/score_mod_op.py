"""Ring attention with a score_mod: the same passes as the op, in an autograd function.

A torch.library op cannot take a Python function. So a compiler breaks its graph here, and a policy of selective
checkpointing cannot save its results; `save_attention` can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.first_order import first_order_only
from ..errors import ScoreModChanged
from ..kernels import KERNELS, Params, ScoreMod, text_of
from ..sharding.plan import Plan
from .backward import gradients
from .call import Call, Results, RingOptions
from .op import count_attention, forward, note_backward
from .saved_results import saved_or


class _State(NamedTuple):
    """The state of a score_mod in the forward, to detect changes before the backward runs it again.

    An attribute that it reads may change, a list that it takes a tensor from, or the tensor itself."""

    mod: ScoreMod
    text: str
    versions: list[int]

    @classmethod
    def of(cls, mod: ScoreMod) -> _State:
        return cls(mod, text_of(mod), [_version(x) for x in (*mod.captured, *mod.fixed)])

    def check(self) -> None:
        """Checks that the function is the forward's.

        Raises:
            ScoreModChanged: the function has changed.
        """
        then, name = self.mod, self.mod.name
        if then.text:
            return
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
    """Returns True for the same tensor, or a new one with the same values."""
    if now is then:
        return True
    alike = now.shape == then.shape and now.dtype == then.dtype and now.device == then.device
    return not then.requires_grad and alike and torch.equal(now, then)


class _Rest(NamedTuple):
    """The parts of a call that are no tensors of autograd."""

    plan: Plan
    params: Params
    options: RingOptions


def flatten(call: Call) -> tuple[Any, ...]:
    """The arguments of `_Scored`."""
    assert call.params.score_mod is not None, "without a score_mod there is the op"
    rest = _Rest(call.plan, call.params, call.options)
    return call.q, call.k, call.v, call.params.sinks, rest, *call.params.score_mod.captured


def unflatten(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rest: _Rest, captured: Sequence[Tensor],
    require_grad: Sequence[bool],
) -> Call:  # fmt: skip
    """The inverse, with the tensors that autograd passed, and gradients for some of the captured ones."""
    assert rest.params.score_mod is not None
    mod = rest.params.score_mod.with_values(captured, require_grad)
    return Call(q, k, v, rest.plan, replace(rest.params, sinks=sinks, score_mod=mod), rest.options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_scored(call: Call) -> tuple[Tensor, Tensor]:
    """As `op.attend`, with a ``score_mod``; differentiable in the tensors that it captures, too."""
    answer: tuple[Tensor, Tensor] = _Scored.apply(*flatten(call))  # type: ignore[no-untyped-call]
    return answer


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rest: _Rest, *captured: Tensor
    ) -> tuple[Tensor, Tensor]:
        call = unflatten(q, k, v, sinks, rest, captured, [False] * len(captured))

        def compute() -> tuple[Tensor, Tensor]:
            count_attention()
            with torch.autocast(q.device.type, enabled=False):
                return forward(call, call.transport(), KERNELS[rest.options.kernel])

        out, lse = saved_or(compute, q)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *captured)
        ctx.rest = rest
        assert rest.params.score_mod is not None
        ctx.state = _State.of(rest.params.score_mod) if any(ctx.needs_input_grad) else None
        if ctx.state is not None:
            note_backward(False)
        return out, lse

    @staticmethod
    @first_order_only("ring attention with a score_mod")
    def backward(ctx: Any, saved: tuple[Any, ...], dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, *captured = saved
        ctx.state.check()
        note_backward(True)
        call = unflatten(q, k, v, sinks, ctx.rest, captured, ctx.needs_input_grad[5:])
        mod = call.params.score_mod
        assert mod is not None
        sums = mod.new_gradients()
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv, dsinks = gradients(
                call, Results(out, lse, dout), call.transport(), KERNELS[call.options.kernel], sums
            )
        rest = [mod.gradient(sums, number) for number in range(len(captured))]
        return (dq, dk, dv, None if sinks is None else dsinks, None, *rest)
