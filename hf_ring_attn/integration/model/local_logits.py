"""Logits of one rank's tokens, as a program gets them: it may neither shift them nor average over them by hand.

A rank has no label for the last token of a chunk: that is in the next chunk, on another rank. And ranks hold different
numbers of labels, so the mean of their means is not the mean of the row. Neither fails: the loss is a little off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from ... import errors


@dataclass(frozen=True, eq=False)
class Origin:
    """Facts about logits of a rank.

    Args:
        vocabulary: V. targets: the rank's shifted labels; None: the batch has none. tokens: of the whole batch, with
            its padding. labelled: how many of them have a label.
    """

    vocabulary: int
    targets: Tensor | None
    tokens: int
    labelled: Tensor | None

    def is_target(self, x: Any) -> bool:
        """Returns True for the shifted labels, in another shape perhaps."""
        y = self.targets
        return isinstance(x, Tensor) and y is not None and (x.data_ptr(), x.numel()) == (y.data_ptr(), y.numel())

    def differs(self) -> bool:
        """Returns True if ranks may hold different numbers of labels. Synchronizes if they are on a GPU."""
        return self.labelled is not None and int(self.labelled) < self.tokens


class LocalLogits(Tensor):
    """Logits of one rank's tokens, or numbers computed from each of them. It has no memory, but holds a tensor.

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
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, LocalLogits)), None)
        if given is not None:
            refuse(given.held, given.origin, function, args, kwargs)
        args, kwargs = tree_map(_held, (args, kwargs))
        result = function(*args, **kwargs)
        return result if given is None else still_local(result, function, given.held, given.origin)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub has no class
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """For code that calls torch below `__torch_function__`."""
        args, kwargs = tree_map(lambda x: _held(x).detach() if isinstance(x, LocalLogits) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


def _held(x: Any) -> Any:
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


def still_local(result: Any, function: Any, logits: Tensor, origin: Origin) -> Any:
    """Marks what was computed from logits as logits of the same tokens, if it has as many numbers; else returns it."""
    if type(result) is not Tensor or result.numel() != logits.numel() or not result.is_floating_point():
        return result
    # Not an attribute, nor what a compiler traces, nor what an autograd function returns, which has no graph yet.
    if function.__name__ == "__get__" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return result
    return LocalLogits.of(result, origin)


def refuse(logits: Tensor, origin: Origin, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses a shift of a rank's logits, and a mean over its labels.

    Args:
        logits: [..., T, V] or [..., V, T]. function, args, kwargs: what is called with them.
    """
    if function is Tensor.__getitem__ and _shifts(logits.shape, origin.vocabulary, args[1]):
        raise errors.ShiftedByHand()
    if function is functional.cross_entropy and logits.requires_grad:
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("reduction", "mean") == "mean" and origin.is_target(given["target"]) and origin.differs():
            raise errors.MeanOfOneRank()


def _shifts(shape: torch.Size, vocabulary: int, index: Any) -> bool:
    """Returns True if an index is [:-1] or [1:] of the tokens, not one of several slices by numbers."""
    entries = [entry for entry in (index if isinstance(index, tuple) else (index,)) if entry is not None]
    if len(shape) < 2 or not all(entry is Ellipsis or isinstance(entry, (slice, int)) for entry in entries):
        return False
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        entries[at : at + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
    tokens = len(shape) - (2 if shape[-1] == vocabulary else 1)
    return tokens < len(entries) and entries[tokens] in (slice(None, -1), slice(0, -1), slice(1, None))
