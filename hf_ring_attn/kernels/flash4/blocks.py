"""The order of flash-attn-4's float32 accumulators: the block of each token.

An accumulator is a row of blocks per head. A block holds ``side`` consecutive tokens in an order known to the kernel
only, so a call must begin at a block boundary. Two arrangements:

- shared segments: [B, heads, blocks of a row]; each segment begins a block, and its last block may be padded. If all
  segments are whole blocks, one call may span several.
- otherwise: [heads, blocks of all rows], flash-attn-4's arrangement for variable lengths: segment i begins at block
  (i * side + its first token) // side, which leaves space for every segment's padding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from ..base import Place


class Sides(NamedTuple):
    """Tokens in a block of dq's accumulator, and in one of dk's and dv's."""

    q: int
    k: int

    def of(self, role: Literal["q", "k", "v"]) -> int:
        return self.q if role == "q" else self.k


Table = Mapping[tuple[int, int], Sides]
"""By widths of keys and values."""

HOPPER: Table = {
    (64, 64): Sides(128, 128),
    (96, 96): Sides(64, 128),
    (128, 128): Sides(64, 128),
    (192, 128): Sides(64, 96),
    (256, 256): Sides(64, 48),
}
"""The tiles of flash-attn-4's causal backward, used for every mask, so that all calls of a ring share one arrangement.
A constant, so that ranks cannot differ."""


class Segment(NamedTuple):
    """A run of tokens of one document; ``block``: its first block, in its row if segments are shared, else in all."""

    number: int
    row: int
    start: int
    length: int
    block: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, eq=False)
class Blocks:
    """The arrangement of one accumulator; `of` returns the same object for the same arguments.

    Args:
        side: tokens in a block.
        batch, tokens: B and T of the tensor.
        shared: as in `Place`.
        segments: in order of batch row and offset; those of one row if they are shared.
    """

    side: int
    batch: int
    tokens: int
    shared: bool
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, place: Place, sides: Sides) -> Blocks:
        table = place.segments.contiguous()
        return _arranged(sides.of(place.of), *place.shape[:2], place.shared, table.numpy().tobytes())

    @cached_property
    def count(self) -> int:
        """Blocks of a head, of one row if segments are shared, else of all rows.

        Depends on the number of segments, not on their lengths: all ranks' accumulators have one size."""
        if self.shared:
            return sum(-(-segment.length // self.side) for segment in self.segments)
        return self.batch * self.tokens // self.side + len(self.segments)

    def shape(self, heads: int, width: int) -> tuple[int, ...]:
        """The shape of an accumulator for ``heads`` heads, ``width`` numbers a token."""
        row = self.count * self.side * width
        return (self.batch, heads, row) if self.shared else (heads, row)

    @cached_property
    def _by_row(self) -> list[list[Segment]]:
        rows: list[list[Segment]] = [[] for _ in range(self.batch)]
        for segment in self.segments:
            if segment.length:
                rows[segment.row].append(segment)
        return [rows[0]] * self.batch if self.shared else rows

    def within(self, row: int, start: int, stop: int) -> Iterator[tuple[Segment, int, int]]:
        """Yields the segments of a batch row that hold tokens start to stop, with the tokens' bounds in each."""
        segments = self._by_row[row]
        at = bisect_right(segments, start, key=lambda segment: segment.start) - 1
        for segment in segments[max(0, at) :]:
            if segment.start >= stop:
                return
            first, last = max(start, segment.start), min(stop, segment.stop)
            if first < last:
                yield segment, first, last

    def floor(self, segment: Segment, token: int) -> int:
        """The first token of the block that holds ``token``."""
        return token - (token - segment.start) % self.side

    def block(self, segment: Segment, token: int) -> int:
        """The block that begins with ``token``."""
        assert (token - segment.start) % self.side == 0
        return segment.block + (token - segment.start) // self.side

    @cached_property
    def joined(self) -> tuple[Segment, ...]:
        """The segments of a row; segments without padding between them are joined."""
        assert self.shared
        joined: list[Segment] = []
        for segment in self.segments:
            before = joined[-1] if joined else None
            if before is not None and segment.start == before.stop and before.length % self.side == 0:
                joined[-1] = before._replace(length=before.length + segment.length)
            else:
                joined.append(segment)
        return tuple(joined)


@lru_cache(maxsize=512)
def _arranged(side: int, batch: int, tokens: int, shared: bool, table: bytes) -> Blocks:
    numbers = memoryview(table).cast("q")
    rows = [tuple(numbers[at : at + 3]) for at in range(0, len(numbers), 3)]
    segments: list[Segment] = []
    block = 0
    for index, (row, start, length) in enumerate(rows):
        if not shared:
            block = (row * tokens + start) // side + index
        segments.append(Segment(index, row, start, length, block))
        if shared:
            block += -(-length // side)
    return Blocks(side, batch, tokens, shared, tuple(segments))
