"""Steps from a model's output to a loss: functions of torch that shift a rank's tokens, divide them, or add them up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ... import errors
from .loss_origins import Origin, Step

MEANS = {"mean", "nanmean"}
DIVISIONS = {"div", "divide", "true_divide", "__truediv__", "div_", "divide_", "true_divide_", "__itruediv__"}
SUMS = {"sum", "nansum"}
PRODUCTS = {"dot", "vdot", "inner", "mv", "matmul", "__matmul__", "einsum"}
OTHER_REDUCTIONS = {"prod", "max", "amax", "min", "amin", "median", "nanmedian", "logsumexp", "std", "var", "norm"}
"""Their result of a row is not the sum of the ranks'."""
TARGETED = {"cross_entropy", "nll_loss", "gather", "take_along_dim"}


def step_of(
    result: Tensor, x: Tensor, origin: Origin, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Step:
    """Returns facts about a function that made ``result`` of ``x``. args, kwargs: as it got them."""
    targets = map(origin.of_target, (*args, *kwargs.values())) if function.__name__ in TARGETED else iter(())
    target = next((flags for flags in targets if flags is not None), None)
    made_of, divisor = _made_of(result, x, origin, function, args), _divisor(x, origin, function, args, kwargs)
    tokens = None if made_of == "summed" else _counted(result, x, origin, function, args, kwargs)
    return Step(tokens, divisor, target, made_of)


def _made_of(result: Tensor, x: Tensor, origin: Origin, function: Any, args: tuple[Any, ...]) -> str:
    """Returns how a function made ``result`` of all tokens of ``x``, or of one of each row.

    "summed": several sums over all tokens; "reduced": by another reduction; "picked": of one token; "": neither.
    """
    axis, name = origin.axis(x.shape), function.__name__
    if axis is None or origin.axis(result.shape) is not None:
        return ""
    if name in OTHER_REDUCTIONS:
        return "reduced"
    if name in SUMS | MEANS and result.dim():
        return "summed"
    entry = _entry_at(x.shape, axis, args[1]) if function is Tensor.__getitem__ and result.dim() < x.dim() else None
    is_one = isinstance(entry, int) or (isinstance(entry, Tensor) and entry.numel() <= origin.rows)
    return "picked" if is_one else ""


def _divisor(
    x: Tensor, origin: Origin, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> float | Tensor | None:
    """Returns by what a function divides tokens, if that may be a number of tokens; else None."""
    if function.__name__ not in DIVISIONS or x.numel() <= origin.rows:  # a sum's gradient tells
        return None
    by: float | Tensor | None = args[1] if len(args) > 1 else kwargs.get("other")
    # One number, or one of each row; else each has its own.
    return by if not isinstance(by, Tensor) or by.numel() in (1, origin.rows) else None


def _counted(
    result: Tensor, x: Tensor, origin: Origin, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int | Tensor | None:
    """Returns of how many tokens a function took the mean, or 1 if the sum; None if neither of whole rows."""
    name, given = function.__name__, _arguments(function, args, kwargs)
    if result.numel() > origin.rows:
        return None
    if name in SUMS | PRODUCTS or given.get("reduction") == "sum":
        return 1
    if name not in MEANS and given.get("reduction") not in ("mean", "batchmean"):
        return None
    if "ignore_index" in given and not given["target"].is_floating_point():
        labelled: Tensor = (given["target"] != given["ignore_index"]).sum()
        return labelled
    if name == "nanmean":
        return (~x.isnan()).sum()
    if origin.axis(x.shape) is None:
        return x.numel() // max(result.numel(), 1)
    return origin.rows * (origin.tokens - len(origin.padding))


def _arguments(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a loss by name, with those that were left out; of other functions none."""
    signature = _signature(function) if getattr(function, "__module__", "") == functional.__name__ else None
    if signature is None:
        return {}
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


@lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        found = inspect.signature(function)
    except ValueError:  # a function in C
        return None
    return found if "reduction" in found.parameters else None


def refuse_shift(shape: torch.Size, origin: Origin, function: Any, args: tuple[Any, ...]) -> None:
    """Refuses all tokens but the first or the last one, unless as one of several slices by numbers.

    Args:
        shape: of what the function is called with.
    """
    axis = origin.axis(shape)
    if axis is None:
        return
    if function.__name__ == "narrow":
        shifts = len(args) == 4 and args[1] % len(shape) == axis and args[2] < 2 and args[3] == shape[axis] - 1
    else:
        shifts = function is Tensor.__getitem__ and _shifts(shape, axis, args[1])
    if shifts:
        raise errors.ShiftedByHand()


def _shifts(shape: torch.Size, axis: int, index: Any) -> bool:
    entry, last = _entry_at(shape, axis, index), shape[axis] - 1
    return isinstance(entry, slice) and (entry.stop == -1 or entry in (slice(None, last), slice(1, None)))


def _entry_at(shape: torch.Size, axis: int, index: Any) -> Any:
    """The entry of an index for an axis; None if it has none, or one that takes several axes."""
    entries = [entry for entry in (index if isinstance(index, tuple) else (index,)) if entry is not None]
    kinds = (slice, int, Tensor, type(Ellipsis))
    if not all(isinstance(entry, kinds) and getattr(entry, "dtype", None) != torch.bool for entry in entries):
        return None
    places = [at for at, entry in enumerate(entries) if entry is Ellipsis]
    for at in places[:1]:
        entries[at : at + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
    return entries[axis] if axis < len(entries) else None
