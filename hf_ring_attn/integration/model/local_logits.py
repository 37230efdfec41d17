"""Numbers of one rank's tokens, as a program gets them: tensors that are followed through torch's functions.

What happens to them on the way to a loss is noted at their origin, the model's output (`loss_origins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .loss_origins import Origin
from .loss_steps import refuse_shift, step_of


class LocalLogits(Tensor):
    """Logits of one rank's tokens, or what was computed from them. It has no memory, but holds a tensor.

    A subclass with memory would not do: compiled functions fail at such inputs (torch 2.13).
    """

    held: Tensor
    origin: Origin

    @staticmethod
    def of(x: Tensor, origin: Origin) -> LocalLogits:
        """Makes them of an ordinary tensor. Gradients reach it through either."""
        local: LocalLogits = _Hold.apply(x)  # type: ignore[no-untyped-call]
        local.held, local.origin = x, origin
        return local

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lists = (x if isinstance(x, (tuple, list)) else (x,) for x in (*args, *kwargs.values()))
        local = [x for x in chain.from_iterable(lists) if isinstance(x, LocalLogits)]
        given = next((x for x in local if held(x).requires_grad), local[0] if local else None)
        args, kwargs = tree_map(held, (args, kwargs))
        if given is None:
            return function(*args, **kwargs)
        x, origin = vars(given)["held"], vars(given)["origin"]
        return followed(function(*args, **kwargs), x, origin, function, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub has no class
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """For code that calls torch below `__torch_function__`."""
        args, kwargs = tree_map(lambda x: held(x).detach() if isinstance(x, LocalLogits) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


def held(x: Any) -> Any:
    """The tensor that local logits hold; anything else as it is."""
    # Its own attribute, read past `__torch_function__`.
    return vars(x)["held"] if isinstance(x, LocalLogits) else x


class _Hold(torch.autograd.Function):
    """A tensor -> one of no memory in its graph."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        made: Tensor = Tensor._make_wrapper_subclass(
            LocalLogits, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device
        )
        return made

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def followed(
    result: Any, x: Tensor, origin: Origin, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Follows what a function computed from local logits ``x``, and notes facts about it.

    Args:
        args, kwargs: as the function got them.

    Raises:
        ShiftedByHand: it took all tokens but the first or the last one.
    """
    refuse_shift(x.shape, origin, function, args)
    # Not an attribute, nor what a compiler traces, nor what an autograd function returns, which has no graph yet.
    if function.__name__ == "__get__" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return result
    if isinstance(result, (tuple, list)):
        parts: Any = [followed(part, x, origin, function, args, kwargs) for part in result]
        return type(result)(parts)
    if type(result) is not Tensor or not result.requires_grad or not result.is_floating_point():
        return result
    if not x.requires_grad:
        origin = origin.anew()
        origin.begin_at(result)
    origin.used = True
    origin.note(result, step_of(result, x, origin, function, args, kwargs))
    return LocalLogits.of(result, origin)
