"""The memory layout of keys and values in a buffer that other ranks copy from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """The layout of a shared buffer: one group of heads after another, with k and v of a token adjacent in a group.

    One copy thus moves both: [B, T, heads of k, then of v], heads flattened. With ``chunks``: [chunks, B, T / chunks,
    ...], so that each chunk of a `Layout` is contiguous."""

    batch: int
    tokens: int
    width: int
    value_width: int
    dtype: torch.dtype
    groups: tuple[tuple[int, int], ...]
    chunks: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, groups: list[slice], chunks: int = 0) -> Packing:
        batch, tokens, _, width = k.shape
        bounds = tuple((group.start, group.stop) for group in groups)
        return cls(batch, tokens, width, v.shape[3], k.dtype, bounds, chunks)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.groups)

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """Byte offsets: the start of each group, then the end of the last."""
        each = self.batch * self.tokens * (self.width + self.value_width) * self.dtype.itemsize
        return tuple(itertools.accumulate((heads * each for heads in self.heads), initial=0))

    def shape(self, number: int) -> tuple[int, ...]:
        width = self.heads[number] * (self.width + self.value_width)
        if self.chunks:
            return self.chunks, self.batch, self.tokens // self.chunks, width
        return self.batch, self.tokens, width

    def views(self, of_ranks: list[Tensor]) -> list[list[tuple[Tensor, ...]]]:
        """Views of all ranks' bytes, by group and rank: the whole, or one view per chunk and batch row."""
        found = []
        for number, (start, stop) in enumerate(itertools.pairwise(self.stops)):
            whole = [x[start:stop].view(self.dtype).view(self.shape(number)) for x in of_ranks]
            found.append([x.flatten(0, 1).unbind(0) if self.chunks else (x,) for x in whole])
        return found

    def places(self, mine: Tensor) -> list[tuple[slice, Tensor, Tensor]]:
        """Views of a rank's bytes for `write`: heads, and where k and v of these go, [B, chunks, T / chunks, groups,
        heads of a group, width]. Groups of as many heads are one view."""
        count = len(self.groups)
        runs = [range(count)] if len(set(self.heads)) == 1 else [range(number, number + 1) for number in range(count)]
        found = []
        for numbers in runs:
            first, last, heads = numbers[0], numbers[-1], self.heads[numbers[0]]
            region = mine[self.stops[first] : self.stops[last + 1]].view(self.dtype)
            into = region.view(len(numbers), max(1, self.chunks), self.batch, -1, self.shape(first)[-1])
            into = into.permute(2, 1, 3, 0, 4)
            k, v = into.split([heads * self.width, heads * self.value_width], -1)
            places = k.unflatten(-1, (heads, -1)), v.unflatten(-1, (heads, -1))
            found.append((slice(self.groups[first][0], self.groups[last][1]), *places))
        return found

    @staticmethod
    def write(places: list[tuple[slice, Tensor, Tensor]], k: Tensor, v: Tensor) -> None:
        """Copies k and v [B, T, G, ...] to `places`."""
        for heads, keys, values in places:
            for x, into in ((k, keys), (v, values)):
                part = x if len(places) == 1 else x[:, :, heads]
                into.copy_(part.view(into.shape))

    def lay_down(
        self, row: Tensor, parts: list[tuple[Tensor, ...]], order: Iterable[int], held: Sequence[Sequence[int]]
    ) -> None:
        """Copies all ranks' chunks (as in `views`) into ``row``, contiguous on both sides; ``held``: chunks by rank."""
        chunks = self.chunks * len(parts)
        places = row.unflatten(1, (chunks, -1)).flatten(0, 1).unbind(0)  # batch row by batch row, chunk by chunk
        for rank in order:
            for at, part in enumerate(parts[rank]):  # chunk by chunk, batch row by batch row
                number, batch_row = divmod(at, self.batch)
                places[batch_row * chunks + held[rank][number]].copy_(part)

    def empty(self, like: Tensor, number: int, ranks: int) -> Tensor:
        """Allocates a receive buffer [B, S, width] for one group of ``ranks`` ranks' tokens."""
        *_, width = self.shape(number)
        return torch.empty(self.batch, ranks * self.tokens, width, dtype=self.dtype, device=like.device)

    def within(self, buffer: Tensor, number: int, ranks: int) -> Tensor:
        """Returns that buffer as a view of a larger group's buffer."""
        shape = self.batch, ranks * self.tokens, self.shape(number)[-1]
        return buffer.view(-1)[: math.prod(shape)].view(shape)

    def apart(self, row: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Splits [B, S, width] into views k and v [B, S, heads, ...]."""
        heads = self.heads[number]
        k, v = row.split([heads * self.width, heads * self.value_width], 2)
        return k.unflatten(2, (heads, -1)), v.unflatten(2, (heads, -1))
