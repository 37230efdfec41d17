"""Gradients that cannot be differentiated again: kernels and messages make them, of which autograd knows nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import SecondGradient, UnsupportedTransform

Backward = Callable[..., Any]
"""``backward(ctx, saved, *gradients)``: of an autograd function, given the tensors that its forward saved."""


def first_order_only(what: str) -> Callable[[Backward], Backward]:
    """Decorates the backward of an autograd function: differentiating its gradients again raises SecondGradient.

    Under create_graph=True each gradient hangs, by a node that refuses, on all that it depends on and that has a
    gradient: saved tensors and incoming gradients. So no way of asking, for whichever inputs, gets past the refusal.
    torch's `once_differentiable` looks at the incoming gradients alone, and gives constants where those are constant.

    Args:
        what: names what is differentiated, for the error.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def decorated(ctx: Any, *gradients: Tensor | None) -> Any:
            saved = ctx.saved_tensors  # once: checkpointing gives each of them a single time
            with torch.no_grad():
                found = backward(ctx, saved, *gradients)
            used = [x for x in (*saved, *gradients) if isinstance(x, Tensor) and x.requires_grad]
            if not torch.is_grad_enabled() or not used:  # enabled by create_graph=True
                return found
            each = found if isinstance(found, tuple) else (found,)
            return tuple(_Refusing.apply(what, x, *used) if isinstance(x, Tensor) else x for x in each)  # type: ignore[no-untyped-call]

        return decorated

    return decorate


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: str, x: Tensor, *_used: Tensor) -> Tensor:
        ctx.what = what
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise SecondGradient(ctx.what)


def refuse_transforms(what: str, *tensors: Tensor | None) -> None:
    """Refuses forward-mode gradients and those of torch.func: an op without a rule for them gives zeros.

    Raises:
        UnsupportedTransform: some tensor has a tangent, or is inside torch.func.grad, jvp, jacrev, ...
    """
    inside = torch._C._functorch.get_dynamic_layer_stack_depth() > 0  # which a compiler knows, and mostly ends it here
    for x in tensors:
        if x is not None and (
            forward_ad.unpack_dual(x).tangent is not None or (inside and torch._C._functorch.is_gradtrackingtensor(x))
        ):
            raise UnsupportedTransform(what)
