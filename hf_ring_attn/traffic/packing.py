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

    def write(self, mine: Tensor, k: Tensor, v: Tensor) -> None:
        if len(set(self.heads)) == 1:  # all groups at once
            runs = [(range(len(self.groups)), k, v)]
        else:
            runs = [
                (range(number, number + 1), k[:, :, start:stop], v[:, :, start:stop])
                for number, (start, stop) in enumerate(self.groups)
            ]
        for numbers, keys, values in runs:
            region = mine[self.stops[numbers.start] : self.stops[numbers.stop]].view(self.dtype)
            into = region.view(len(numbers), *self.shape(numbers.start))
            split = self.heads[numbers.start] * self.width
            for x, part in ((keys, into[..., :split]), (values, into[..., split:])):
                by_group = x.unflatten(2, (len(numbers), -1)).movedim(2, 0)  # [groups, B, T, heads, width]
                if self.chunks:
                    by_group = by_group.unflatten(2, (self.chunks, -1)).movedim(2, 1)
                part.unflatten(-1, by_group.shape[-2:]).copy_(by_group)

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
