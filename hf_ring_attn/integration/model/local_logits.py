"""Numbers of one rank's tokens, as a program gets them: it may neither shift them nor divide by its own count of them.

A rank has no label for the last token of a chunk: that is in the next chunk, on another rank. And ranks hold different
numbers of labels, so the mean of their means is not the mean of the row. Neither fails: the loss is a little off.

Nor may it count tokens that only pad the row to the ring's length: they have a gradient then. And what it makes of all
tokens of a row, or of its last one, is made of a rank's.

So what a model returns for each token is followed through torch's functions, and compared with the other ranks' in the
backward. What a rank's loss was divided by, as by a mean, must be the same. So must the gradient of a sum over tokens:
it is another where the loss is a function of a rank's sum. And targets must not be the rank's own labels, shifted. What
is only logged has no backward.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from ... import errors
from ...comm.fingerprint import numbers_of, row_of
from ...comm.ring import Ring
from . import loss_gradients

MEANS = {"mean", "nanmean"}
DIVISIONS = {"div", "divide", "true_divide", "__truediv__", "div_", "divide_", "true_divide_", "__itruediv__"}
SUMS = {"sum", "nansum", "mean", "nanmean"}
OTHER_REDUCTIONS = {"prod", "max", "amax", "min", "amin", "median", "nanmedian", "logsumexp", "std", "var", "norm"}
"""Their result of a row is not the sum of the ranks'."""
TARGETED = {"cross_entropy", "nll_loss", "gather", "take_along_dim"}


@dataclass(eq=False)
class Origin:
    """One output of a model for each of a rank's tokens, and what a program divides by on the way to its loss.

    Args:
        rows, tokens: B and T. padding: the places among T of tokens that pad the row to the ring's length.
        labels: the rank's labels, and those that were shifted on the whole row, both [B, T], if the batch has any.

    Attributes:
        used: a loss may have been computed from it, on every rank.
        divisors, targets: of the current backward; targets as two flags each, see `of_target`.
        reduced, picked: what must be the same of results made of all tokens, and of one token.
    """

    ring: Ring
    rows: int
    tokens: int
    padding: list[int]
    labels: tuple[Tensor, Tensor] | None = None
    used: bool = False
    divisors: list[Any] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    reduced: list[Tensor] = field(default_factory=list)
    picked: list[Tensor] = field(default_factory=list)

    def begin_at(self, x: Tensor) -> None:
        """Lets ranks compare once the backward has the gradient of ``x``, on which all that is followed depends."""
        if x.requires_grad:
            weakref.finalize(self, x.register_hook(_comparison(weakref.ref(self))).remove)

    def anew(self) -> Origin:
        """The same for another beginning."""
        return replace(self, divisors=[], targets=[], reduced=[], picked=[])

    def axis(self, shape: torch.Size) -> int | None:
        """The axis of the tokens; None: it is not for each token."""
        if shape[:1] == (self.rows * self.tokens,):
            return 0
        return next((axis for axis in (*range(1, len(shape)), 0) if shape[axis : axis + 1] == (self.tokens,)), None)

    def of_target(self, x: Any) -> Tensor | None:
        """[2] integers for targets: they are the rank's labels shifted by hand; they are others.

        Both 0: they are the labels that were shifted on the whole row, which differ where two chunks meet. None: no
        targets of all tokens, or of all but one.
        """
        sizes = (self.rows * self.tokens, self.rows * (self.tokens - 1))
        if self.labels is None or not isinstance(x, Tensor) or x.is_floating_point() or x.numel() not in sizes:
            return None
        known = x.detach().reshape(self.rows, -1)[:, : self.tokens - 1]

        def like(y: Tensor) -> Tensor:
            """[2] Exactly, and where there are labels."""
            return torch.stack([(known.clamp(min=0) == y.clamp(min=0)).all(), ((known == y) | (y < 0)).all()])

        by_hand, right = like(self.labels[0][:, 1:]), like(self.labels[1][:, :-1])
        return torch.stack([(by_hand & ~right).any(), ~(by_hand | right).any()]).long()

    def note(self, result: Tensor, divisor: Any, target: Tensor | None, made_of: str) -> None:
        """Notes, once the backward passes through ``result``, what it was divided by, its targets' flags, its gradient.

        Args:
            made_of: see `_made_of`.
        """

        def passes(gradient: Tensor) -> None:
            if made_of:
                kept = result if made_of == "reduced" else gradient
                (self.picked if made_of == "picked" else self.reduced).append(kept.detach())
            if divisor is not None:
                one = divisor.detach().double().reshape(-1) if isinstance(divisor, Tensor) else float(divisor)
                self.divisors.append(one)
            if target is not None:
                self.targets.append(target)

        if divisor is not None or target is not None or made_of:
            result.register_hook(passes)

    def compare(self, gradient: Tensor) -> None:
        """Starts the comparison."""
        if not self.used:
            return
        device = self.ring.small_device(gradient.device)
        picked = self.picked if len(self.picked) == 1 else []  # more: a program that takes token by token
        mine: list[Any] = [0, 0, 0, *_as_set(self.divisors, device), *_as_set([*self.reduced, *picked], device)]
        if self.targets:
            mine[:2] = torch.stack(self.targets).amax(0).to(device)
        if self.padding and gradient.shape[:2] == (self.rows, self.tokens):  # else it is that of a weight
            mine[2] = gradient[:, self.padding].any().long().to(device)
        self.divisors, self.targets, self.reduced, self.picked = [], [], [], []
        end = self.ring.start_agreement({}, device, collect=mine, doing="compared how it made its loss")
        loss_gradients.wait_for(device, lambda: _refuse(*end()))


def _comparison(of: weakref.ref[Origin]) -> Callable[[Tensor], None]:
    """A hook that does not keep its origin alive: a weight may have it."""

    def compare(gradient: Tensor) -> None:
        origin = of()
        if origin is not None:
            origin.compare(gradient)

    return compare


def _as_set(found: list[Any], device: torch.device) -> tuple[int, int | Tensor]:
    """Is there any, and a number for all of them, each once, since ranks may sum over different numbers of parts."""
    if not found:
        return 0, 0
    numbers = row_of(numbers_of(found), device).sort().values
    again = numbers == numbers.roll(1)
    again[0] = False
    return 1, numbers.masked_fill(again, 0).sum()


def _differ(there: list[int], numbers: list[int]) -> bool:
    return len({number for is_there, number in zip(there, numbers, strict=True) if is_there}) > 1


def _refuse(by_hand: list[int], others: list[int], counts_padding: list[int], *compared: list[int]) -> None:
    # Of few labels, those of a rank may be the same either way.
    if any(by_hand) and not any(others):
        raise errors.ShiftedByHand()
    divides_by_another = _differ(*compared[:2])
    if _differ(*compared[2:]) and not divides_by_another:
        raise errors.PooledOnOneRank()
    if any(counts_padding):
        raise errors.PaddingInLoss()
    if divides_by_another:
        raise errors.MeanOfOneRank()


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
        refuse_shift(x.shape, origin, function, args)
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
    """Follows what a function computed from local logits ``x``, and notes what it divided by.

    Args:
        args, kwargs: as the function got them.
    """
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
    targets = map(origin.of_target, (*args, *kwargs.values())) if function.__name__ in TARGETED else iter(())
    target = next((flags for flags in targets if flags is not None), None)
    divisor = _divisor(result, x, origin, function, args, kwargs)
    origin.note(result, divisor, target, _made_of(result, x, origin, function, args))
    return LocalLogits.of(result, origin)


def _made_of(result: Tensor, x: Tensor, origin: Origin, function: Any, args: tuple[Any, ...]) -> str:
    """Returns how a function made ``result`` of all tokens of ``x``, or of one of each row.

    "summed": several sums over all tokens; "reduced": by another reduction; "picked": of one token; "": neither.
    """
    axis, name = origin.axis(x.shape), function.__name__
    if axis is None or origin.axis(result.shape) is not None:
        return ""
    if name in OTHER_REDUCTIONS:
        return "reduced"
    if name in SUMS and result.dim():
        return "summed"
    entry = _entry_at(x.shape, axis, args[1]) if function is Tensor.__getitem__ and result.dim() < x.dim() else None
    is_one = isinstance(entry, int) or (isinstance(entry, Tensor) and entry.numel() <= origin.rows)
    return "picked" if is_one else ""


def _divisor(
    result: Tensor, x: Tensor, origin: Origin, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Returns what a function divides by, if that may be a number of tokens; else None."""
    name = function.__name__
    if name in DIVISIONS:
        by = args[1] if len(args) > 1 else kwargs.get("other")
        # One number, or one of each row; else each has its own.
        return by if not isinstance(by, Tensor) or by.numel() in (1, origin.rows) else None
    given = _arguments(function, args, kwargs)
    if name not in MEANS and given.get("reduction") not in ("mean", "batchmean"):
        return None
    if "ignore_index" in given and not given["target"].is_floating_point():
        return (given["target"] != given["ignore_index"]).sum()
    if name == "nanmean":
        return (~x.isnan()).sum()
    if origin.axis(x.shape) is None:
        return x.numel() // max(result.numel(), 1)
    real = origin.rows * (origin.tokens - len(origin.padding))
    return real if origin.axis(result.shape) is None else None


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
