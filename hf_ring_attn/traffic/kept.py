"""Gathered keys and values that outlive their attention, for others of the very same ones.

An op takes tensors and numbers, so it is told by a number where to keep what it gathers, or where to find it. Who makes
a `Kept` owns that memory: nothing here lets it live longer.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

from torch import Tensor

Part = tuple[slice, Tensor, Tensor]


class Kept:
    """The keys and values [B, S, heads, ...] of one plan's forward, by groups of heads; None until all have come.

    Args of an op: its ``number``, which is never 0.
    """

    def __init__(self) -> None:
        self.parts: list[Part] | None = None
        self.number = next(_NUMBERS)
        _ALIVE[self.number] = self

    @staticmethod
    def of(number: int) -> Kept | None:
        """None for 0."""
        return _ALIVE[number] if number else None

    def filling(self, gathered: Iterator[Part]) -> Iterator[Part]:
        """The same parts, which are kept once all of them have come."""
        parts = []
        for part in gathered:
            parts.append(part)
            yield part
        self.parts = parts


_NUMBERS = itertools.count(1)
_ALIVE: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()
