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
from .origins import Origin, Step
from .trials import tried

MEANS = {"mean", "nanmean"}
DIVISIONS = {"div", "divide", "true_divide", "__truediv__", "div_", "divide_", "true_divide_", "__itruediv__"}
FACTORS = {"mul", "multiply", "__mul__", "__rmul__", "mul_", "multiply_", "__imul__"}
COMPARISONS = {
    "gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal", "__gt__", "__ge__", "__lt__", "__le__",
}  # fmt: skip
SUMS = {"sum", "nansum"}
PRODUCTS = {"dot", "vdot", "inner", "mv", "mm", "bmm", "matmul", "__matmul__", "__rmatmul__", "einsum", "tensordot"}
OTHER_REDUCTIONS = {"prod", "max", "amax", "min", "amin", "median", "nanmedian", "logsumexp", "std", "var", "norm"}
"""Their result of a row is not the sum of the ranks'."""
TARGETED = {"cross_entropy", "nll_loss", "gather", "take_along_dim"}


def step_of(
    result: Tensor, x: Tensor, origin: Origin, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    past: Any,
) -> Step:  # fmt: skip
    """Returns facts about a function that made ``result`` of ``x``. args, kwargs: as it got them. past: of ``x``."""
    targets = map(origin.of_target, (*args, *kwargs.values())) if function.__name__ in TARGETED else iter(())
    target = next((flags for flags in targets if flags is not None), None)
    made_of = _made_of(result, x, origin, function, args, kwargs, past.selected)
    has_tokens = origin.axis(result.shape, past.selected) is not None
    is_of_rows = bool(result.numel()) and not (past.selected and has_tokens)
    counts = is_of_rows and not past.pooled and made_of != "summed"
    counted = _counted(result, x, origin, function, args, kwargs) if counts else None
    if made_of == "summed" and past.selected and function.__name__ in MEANS:
        counted = past.selected
    number, tokens = _number(x, origin, function, args, kwargs), past.selected or origin.rows * origin.tokens
    is_each = result.numel() == tokens and has_tokens
    return Step(counted if made_of in ("", "summed") else None, number, target, made_of, is_each, past.statistics)


def _made_of(
    result: Tensor, x: Tensor, origin: Origin, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    selected: int,
) -> str:  # fmt: skip
    """Returns how a function made ``result`` of all tokens of ``x``, or of one of each row.

    "summed": several sums over all tokens; "reduced": by another reduction; "picked": of one token; "mixed": each token
    of others, too; "ordered": the same tokens in another order; "": none of these.
    """
    axis, name = origin.axis(x.shape, selected), function.__name__
    if axis is None or _arguments(function, args, kwargs).get("reduction", "none") != "none":
        return ""
    kind = tried(function, args, kwargs, x.shape[axis])
    if kind in ("mixed", "ordered"):
        return kind
    if origin.axis(result.shape, selected) is not None:
        return ""
    if name in OTHER_REDUCTIONS or kind == "reduced":
        return "reduced"
    if name in SUMS | MEANS | PRODUCTS and result.dim():
        return "summed"
    entry = _entry_at(x.shape, axis, args[1]) if function is Tensor.__getitem__ and result.dim() < x.dim() else None
    is_one = isinstance(entry, int) or (isinstance(entry, Tensor) and entry.numel() <= origin.rows)
    return "picked" if is_one else ""


def selected_by(result: Tensor, x: Tensor, origin: Origin, selected: int, function: Any, args: tuple[Any, ...]) -> int:
    """Returns how many tokens ``result`` is of, if a program selected these by a mask or by their places; else 0."""
    axis, name = origin.axis(x.shape, selected), function.__name__
    if axis is None:
        return 0
    if name == "masked_select":
        return result.numel()
    if name == "index_select" and result.dim() == x.dim() and result.shape[axis] != x.shape[axis]:
        return result.shape[axis]
    if function is Tensor.__getitem__:
        entries = args[1] if isinstance(args[1], tuple) else (args[1],)
        place = next((at for at, entry in enumerate(entries) if isinstance(entry, Tensor)), None)
        if place is not None and place < result.dim() and entries[place].numel() > origin.rows:
            return result.shape[place]
    return selected if selected in result.shape else 0


def statistics_of(
    result: Tensor, origin: Origin, step: Step, selected: int, before: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Returns the numbers of a rank's tokens that are in a ``result`` without a gradient. ``before``: of its inputs."""
    reduces = step.made_of in ("summed", "reduced", "picked") or step.tokens is not None
    if origin.axis(result.shape, selected) is None:
        return (result,) if reduces or before else ()
    mixes = (origin.ring.rank,) if step.made_of in ("mixed", "ordered") else ()
    return (*before, *mixes, *(() if step.divisor is None else (step.divisor,)))


def _number(
    x: Tensor, origin: Origin, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> float | Tensor | None:
    """Returns by what a function divides or multiplies tokens, or compares them, if that may be a number of tokens."""
    if function.__name__ not in DIVISIONS | FACTORS | COMPARISONS or x.numel() <= origin.rows:  # a sum's gradient tells
        return None
    by: Any = next((one for one in (*args, *kwargs.values()) if one is not x), None)
    if isinstance(by, Tensor):  # one number, or one of each row; else each has its own
        return by if by.numel() in (1, origin.rows) and not by.requires_grad else None
    return float(by) if isinstance(by, (int, float)) and by else None


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
        target, weight = given["target"], given.get("weight")
        is_labelled = target != given["ignore_index"]
        each = is_labelled if weight is None else weight[target.where(is_labelled, 0)] * is_labelled
        labelled: Tensor = each.sum()
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


def cut_of(shape: torch.Size, origin: Origin, function: Any, args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Returns the first token and the end of those that a slice takes; None: it is no slice of tokens."""
    axis = origin.axis(shape)
    if axis is None or function is not Tensor.__getitem__ or shape[axis] != origin.tokens:
        return None
    entry = _entry_at(shape, axis, args[1])
    if not isinstance(entry, slice) or entry == slice(None):
        return None
    start, stop, by = entry.indices(shape[axis])
    return (start, stop) if by == 1 and stop > start else None


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
