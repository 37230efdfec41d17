"""Calls of torch's functions on numbers of one rank's tokens, as a program makes them on the way to its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...comm.ring import Ring


@dataclass(eq=False)
class Share:
    """One rank's tokens of a batch.

    Args:
        rows, tokens: B and T. padding: the places among T of tokens that pad the row to the ring's length.
        labels: the rank's labels, and those that were shifted on the whole row by one token, both [B, T], if the batch
            has any. known_targets: makes what a loss may have as targets (`shifts.KnownTargets`).
    """

    ring: Ring
    rows: int
    tokens: int
    padding: list[int]
    labels: tuple[Tensor, Tensor] | None = None
    known_targets: Callable[[], Any] | None = None

    def axis(self, shape: torch.Size, selected: int = 0) -> int | None:
        """The axis of the tokens; None: it is not for each token. ``selected``: their number, if these are not all."""
        if selected:
            return next((axis for axis, size in enumerate(shape) if size == selected), None)
        if shape[:1] == (self.rows * self.tokens,):
            return 0
        return next((axis for axis in (*range(1, len(shape)), 0) if shape[axis : axis + 1] == (self.tokens,)), None)


class Past(NamedTuple):
    """Facts about how a program computed numbers from a rank's tokens.

    Args:
        selected: the number of tokens that it selected; 0: all of the rank's. is_pooled: it made them of all tokens.
        statistics: numbers of the rank's tokens in a value without a gradient, which a loss may use.
    """

    selected: int = 0
    is_pooled: bool = False
    statistics: tuple[Any, ...] = ()


NOTHING = Past()


@dataclass(eq=False)
class Call:
    """A call of a function of torch with numbers of a rank's tokens.

    Args:
        args, kwargs: as the function got them. x: one of the numbers of tokens. past: of ``x``, with the statistics of
            all arguments.
    """

    share: Share
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    x: Tensor
    past: Past = NOTHING

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    @property
    def other(self) -> Any:
        """The first argument beside ``x``; None: there is no other."""
        return next((one for one in (*self.args, *self.kwargs.values()) if one is not self.x), None)

    @property
    def axis(self) -> int | None:
        """The axis of the tokens of ``x``."""
        return self.share.axis(self.x.shape, self.past.selected)

    def axis_in(self, result: Tensor) -> int | None:
        """The axis of the same tokens in a result."""
        return self.share.axis(result.shape, self.past.selected)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a loss by name, with those that were left out; of other functions none."""
        of_losses = getattr(self.function, "__module__", "") == functional.__name__
        if not of_losses or "reduction" not in getattr(self.function, "__annotations__", ()):
            return {}
        bound = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments

    @property
    def entries(self) -> tuple[Any, ...]:
        """The entries of the index of ``x[...]``; of other functions none."""
        if self.function is not Tensor.__getitem__:
            return ()
        return self.args[1] if isinstance(self.args[1], tuple) else (self.args[1],)

    def entry(self, axis: int) -> Any:
        """The entry for an axis in the index of ``x[...]``; None if it has none, or one that takes several axes."""
        size = self.x.shape[axis]
        if self.name == "narrow" and len(self.args) == 4 and self.args[1] % self.x.dim() == axis:
            start = self.args[2] % size
            return slice(start or None, None if start + self.args[3] == size else start + self.args[3])
        entries = [entry for entry in self.entries if entry is not None]
        kinds = (slice, int, Tensor, type(Ellipsis))
        if not all(isinstance(entry, kinds) and getattr(entry, "dtype", None) != torch.bool for entry in entries):
            return None
        for at in [at for at, entry in enumerate(entries) if entry is Ellipsis]:
            entries[at : at + 1] = [slice(None)] * (self.x.dim() - len(entries) + 1)
        return entries[axis] if axis < len(entries) else None

    def selected_in(self, result: Tensor) -> int:
        """The number of tokens that ``result`` is of, if the program selected these by a mask or by places; else 0."""
        axis, shape = self.axis, result.shape
        if axis is None:
            return 0
        if self.name == "masked_select":
            return result.numel()
        if self.name == "index_select" and len(shape) == self.x.dim() and shape[axis] != self.x.shape[axis]:
            return shape[axis]
        for place, entry in enumerate(self.entries):
            if isinstance(entry, Tensor):
                if place < len(shape) and entry.numel() > self.share.rows:
                    return shape[place]
                break
        return self.past.selected if self.past.selected in shape else 0
