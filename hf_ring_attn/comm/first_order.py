"""Gradients that cannot be differentiated again: kernels and messages make them, of which autograd knows nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import SecondGradient

Backward = Callable[..., Any]


def once(what: str) -> Callable[[Backward], Backward]:
    """Decorates the backward of an autograd function: whoever differentiates its gradients gets SecondGradient.

    torch's `once_differentiable` does so only where the gradient that comes in requires one; where it does not, as of a
    plain sum, it gives constants out, though they depend on the inputs of the forward.

    Args:
        what: of which the gradients are, in words.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def decorated(ctx: Any, *gradients: Tensor | None) -> Any:
            again = torch.is_grad_enabled()  # by create_graph=True
            with torch.no_grad():
                found = backward(ctx, *gradients)
            if not again:
                return found
            leaf = torch.zeros((), requires_grad=True)
            each = found if isinstance(found, tuple) else (found,)
            return tuple(_Refusing.apply(x, leaf, what) if isinstance(x, Tensor) else x for x in each)  # type: ignore[no-untyped-call]

        return decorated

    return decorate


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _leaf: Tensor, what: str) -> Tensor:
        ctx.what = what
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise SecondGradient(ctx.what)
