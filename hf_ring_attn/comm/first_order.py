"""Refuses second-order gradients: kernels and collectives compute the first ones outside autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import SecondGradient, UnsupportedTransform, UnsupportedVmap

Backward = Callable[..., Any]
"""``backward(ctx, saved, *gradients)`` of an autograd function; ``saved``: the tensors that its forward saved."""


def first_order_only(what: str) -> Callable[[Backward], Backward]:
    """Decorates the backward of an autograd function: differentiating its gradients again raises SecondGradient.

    Under create_graph=True a node that raises connects each gradient with all it depends on: saved tensors and incoming
    gradients. torch's `once_differentiable` looks at the incoming gradients alone, and silently gives constants if
    those are constant.

    Args:
        what: the name of the differentiated operation, for the error.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def decorated(ctx: Any, *gradients: Tensor | None) -> Any:
            saved = ctx.saved_tensors  # read once: checkpointing returns each tensor a single time
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


def refuse_second_gradients(nodes: Iterable[Any]) -> None:
    """Refuses a graph that differentiates a gradient again, before its backward does.

    Raises:
        SecondGradient.
    """
    for node in nodes:
        if type(node).__name__ == f"{_Refusing.__name__}Backward":
            raise SecondGradient(node.what)


_TRACEABLE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""torch's compiler traces the question below; that of torch 2.11 ends a graph there with an error. So before torch 2.13
a compiled function with forward-mode gradients (torch.func.jvp) is not refused: call it uncompiled there."""


def refuse_transforms(what: str, *tensors: Tensor | None) -> None:
    """Refuses forward-mode gradients and those of torch.func: an op without a rule for them gives zeros.

    Raises:
        UnsupportedTransform: some tensor has a tangent, or is inside torch.func.grad, jvp, jacrev, ...
    """
    if torch.compiler.is_dynamo_compiling() and not _TRACEABLE:
        return
    inside = inside_transforms()
    for x in tensors:
        if x is not None and (
            forward_ad.unpack_dual(x).tangent is not None or (inside and torch._C._functorch.is_gradtrackingtensor(x))
        ):
            raise UnsupportedTransform(what)


def refuse_vmap(what: str, **arguments: object) -> None:
    """Refuses torch.func.vmap over arguments whose values are read, by name. A function's values are tried.

    Raises:
        UnsupportedVmap.
    """
    given = {name: x for name, x in arguments.items() if x is not None}
    if not given or (torch.compiler.is_dynamo_compiling() and not _TRACEABLE) or not inside_transforms():
        return
    for name, x in given.items():
        if not isinstance(x, Tensor) or torch._C._functorch.is_batchedtensor(x):
            raise UnsupportedVmap(f"{what} was called with {name}")


def inside_transforms() -> bool:
    """Returns True inside a transform of torch.func, which a compiler knows, and mostly ends there."""
    return bool(torch._C._functorch.get_dynamic_layer_stack_depth() > 0)
