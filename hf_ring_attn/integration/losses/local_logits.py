"""Numbers of one rank's tokens, as a program gets them: tensors that are followed through torch's functions.

What happens to them on the way to a loss is noted at their origin, the model's output (`origins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .origins import Origin
from .steps import cut_of, refuse_shift, selected_by, statistics_of, step_of


class Past(NamedTuple):
    """Facts about what a program computed from a rank's tokens.

    Args:
        selected: the number of tokens that it selected; 0: all of the rank's. pooled: it reduced them.
        statistics: numbers of the rank's tokens in a value without a gradient, which a loss may use.
    """

    selected: int = 0
    pooled: bool = False
    statistics: tuple[Any, ...] = ()


NOTHING = Past()


class LocalLogits(Tensor):
    """Logits of one rank's tokens, or what was computed from them. It has no memory, but holds a tensor.

    A subclass with memory would not do: compiled functions fail at such inputs (torch 2.13).
    """

    held: Tensor
    origin: Origin
    past: Past

    @staticmethod
    def of(x: Tensor, origin: Origin, past: Past = NOTHING) -> LocalLogits:
        """Makes them of an ordinary tensor. Gradients reach it through either."""
        local: LocalLogits = _Hold.apply(x)  # type: ignore[no-untyped-call]
        local.held, local.origin, local.past = x, origin, past
        return local

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lists = (x if isinstance(x, (tuple, list)) else (x,) for x in (*args, *kwargs.values()))
        local = [x for x in chain.from_iterable(lists) if isinstance(x, LocalLogits)]
        given = next((x for x in local if held(x).requires_grad), local[0] if local else None)
        # What a function of the program's own made has its gradient from that function.
        statistics = [() if _is_attached(x) else vars(x)["past"].statistics for x in local]
        args, kwargs = tuple(map(_all_held, args)), {name: _all_held(x) for name, x in kwargs.items()}
        if given is None:
            return function(*args, **kwargs)
        x, origin, past = held(given), vars(given)["origin"], vars(given)["past"]
        each_once = {id(one): one for several in statistics for one in several}
        past = past._replace(statistics=tuple(each_once.values()))
        return followed(function(*args, **kwargs), x, origin, function, args, kwargs, past)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub has no class
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """For code that calls torch below `__torch_function__`."""
        args, kwargs = tree_map(lambda x: held(x).detach() if isinstance(x, LocalLogits) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


def held(x: Any) -> Any:
    """The tensor that local logits hold; anything else as it is."""
    if not isinstance(x, LocalLogits):
        return x
    return _Read.apply(x) if _is_attached(x) else vars(x)["held"]  # type: ignore[no-untyped-call]


def _all_held(x: Any) -> Any:
    """`held`, also of what is in a list; most arguments are in none, and functions are many."""
    return tree_map(held, x) if isinstance(x, (tuple, list, dict)) else held(x)


def _is_attached(x: LocalLogits) -> bool:
    """Returns True if a function of the program's own made these: they have a gradient, what they hold has none."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad and torch.is_grad_enabled() and not vars(x)["held"].requires_grad


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


class _Read(torch.autograd.Function):
    """Local logits -> the tensor that they hold, in their graph."""

    @staticmethod
    def forward(_ctx: Any, x: LocalLogits) -> Tensor:
        tensor: Tensor = vars(x)["held"]
        return tensor.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def followed(
    result: Any,
    x: Tensor,
    origin: Origin,
    function: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    past: Past = NOTHING,
) -> Any:
    """Follows what a function computed from local logits ``x``, and notes facts about it.

    Args:
        args, kwargs: as the function got them. past: of ``x``, with the statistics of all arguments.

    Raises:
        ShiftedByHand: it took all tokens but the first or the last one.
    """
    if x.requires_grad or not origin.trains:  # else it is detached, as for a log
        refuse_shift(x.shape, origin, function, args)
    # Not an attribute, but a transpose; nor what a compiler traces.
    is_attribute = function.__name__ == "__get__" and function.__self__.__name__ not in ("T", "mT")
    if is_attribute or torch.compiler.is_compiling():
        return result
    if isinstance(result, (tuple, list)):
        parts: Any = [followed(part, x, origin, function, args, kwargs, past) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if type(result) is not Tensor:
        return result
    trains = result.requires_grad and torch.is_grad_enabled() and result.is_floating_point()
    if not (trains or origin.trains):
        return result
    step = step_of(result, x, origin, function, args, kwargs, past)
    reduces = step.made_of in ("summed", "reduced", "picked") or step.tokens is not None
    after = Past(selected_by(result, x, origin, past.selected, function, args), past.pooled or reduces)
    if not trains:
        return LocalLogits.of(
            result.detach(),  # a view made without gradients, as in a function's own forward, says that it has one
            origin,
            after._replace(statistics=statistics_of(result, origin, step, after.selected, past.statistics)),
        )
    if not x.requires_grad:
        origin = origin.anew()
        origin.begin_at(result)
    origin.used = True
    origin.note(result, step, cut_of(x.shape, origin, function, args))
    return LocalLogits.of(result, origin, after)
