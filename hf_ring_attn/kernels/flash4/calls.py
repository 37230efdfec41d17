"""Conversion of tables of tiles to few calls of flash-attn-4, once per table.

flash-attn-4 aligns a rectangle at its lower right corner: query i of m and key j of n have the distance
i + (n - m) - j, and see each other iff -right <= distance <= left. A tile's band is on positions, so
left = hi - d and right = d - lo, where d is the queries' last position minus the keys' last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ...sharding.mask import UNBOUNDED, Tile
from .blocks import Blocks

DENSE_AT_MOST = 4
"""Most separate calls for one table; more become one call with a list of lengths, which saves launches."""


class Bounds(NamedTuple):
    """Bounds of visible distances, as in the module; None: no bound."""

    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        return self == (None, 0)


FREE = Bounds(None, None)


class Rectangle(NamedTuple):
    """Tokens of a tensor of queries and of one of keys."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


class Dense(NamedTuple):
    """One rectangle of a range of batch rows; ``q_block`` and ``k_block``: its first blocks in the accumulators."""

    rows: tuple[int, int]
    at: Rectangle
    bounds: Bounds
    q_block: int = 0
    k_block: int = 0


@dataclass(frozen=True, eq=False)
class Packed:
    """One rectangle per entry, in tensors with their batch rows concatenated.

    Entry i begins at token starts[i] and has lengths[i] tokens, maybe 0. The arrangement of accumulators without
    shared segments follows from starts and i.
    """

    bounds: Bounds
    q_starts: tuple[int, ...]
    q_lengths: tuple[int, ...]
    k_starts: tuple[int, ...]
    k_lengths: tuple[int, ...]


Call = Dense | Packed


class Forward(NamedTuple):
    """Calls that write every query at most once. ``whole``: exactly once; ``reach``: the mask's bounds."""

    calls: tuple[Call, ...]
    whole: bool
    reach: Bounds


def forward_calls(tiles: Tensor, batch: int, queries: int, keys: int) -> Forward:
    """Converts tiles to the calls of a forward over ``batch`` rows of these lengths."""
    return _forward_calls(tiles.contiguous().numpy().tobytes(), batch, queries, keys)


def backward_calls(tiles: Tensor, q: Blocks, k: Blocks) -> tuple[Call, ...]:
    """Converts tiles to the calls of a backward into accumulators of these arrangements."""
    return _backward_calls(tiles.contiguous().numpy().tobytes(), q, k)


def read_tiles(table: bytes) -> Iterator[Tile]:
    """The tiles of a table's bytes."""
    numbers, columns = memoryview(table).cast("q"), len(Tile._fields)
    for at in range(0, len(numbers), columns):
        yield Tile(*numbers[at : at + columns])


def rectangle(tile: Tile) -> tuple[Rectangle, Bounds]:
    """Converts a tile to a rectangle of its tensors and bounds from its lower right corner."""
    behind = tile.q_position + tile.q_length - tile.k_position - tile.k_length
    left = None if tile.hi >= UNBOUNDED else tile.hi - behind
    right = None if tile.lo <= -UNBOUNDED else behind - tile.lo
    assert (left is None or left >= 0) and (right is None or right >= 0), f"{tile} is not cut to what is visible"
    at = Rectangle(tile.q_offset, tile.q_offset + tile.q_length, tile.k_offset, tile.k_offset + tile.k_length)
    return at, Bounds(left, right)


@lru_cache(maxsize=256)
def _forward_calls(table: bytes, batch: int, queries: int, keys: int) -> Forward:
    rows_of: dict[tuple[Rectangle, Bounds], list[int]] = {}
    reach, covered = FREE, [0] * batch
    for tile in sorted(read_tiles(table)):
        assert tile.q_offset >= covered[tile.row], "a query met two tiles: unsupported() should have refused holes"
        covered[tile.row] = tile.q_offset + tile.q_length
        at, bounds = rectangle(tile)
        reach = Bounds(None if bounds.left is None else tile.hi, None if bounds.right is None else -tile.lo)
        rows_of.setdefault((at, bounds), []).append(tile.row)

    dense = [Dense(rows, *key) for key, row_list in rows_of.items() for rows in _runs(row_list)]
    written = sum((at.q_stop - at.q_start) * len(rows) for (at, _), rows in rows_of.items())
    whole = written == batch * queries
    if len(dense) <= DENSE_AT_MOST:
        return Forward(tuple(dense), whole, reach)
    entries: dict[Bounds, list[Rectangle]] = {}
    for (at, bounds), row_list in rows_of.items():
        for row in row_list:
            q, k = row * queries, row * keys
            entries.setdefault(bounds, []).append(
                Rectangle(at.q_start + q, at.q_stop + q, at.k_start + k, at.k_stop + k)
            )
    return Forward(tuple(pack_call(bounds, dict(enumerate(list_))) for bounds, list_ in entries.items()), whole, reach)


def pack_call(bounds: Bounds, entries: dict[int, Rectangle]) -> Packed:
    """Makes one call of numbered entries; missing numbers become empty entries."""
    every = [entries.get(index, Rectangle(0, 0, 0, 0)) for index in range(max(entries) + 1)]
    return Packed(
        bounds,
        tuple(at.q_start for at in every),
        tuple(at.q_stop - at.q_start for at in every),
        tuple(at.k_start for at in every),
        tuple(at.k_stop - at.k_start for at in every),
    )


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Splits sorted row numbers into runs: (first, last + 1)."""
    start = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield rows[start], rows[at - 1] + 1
            start = at


# ---- backward ------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The part of a tile in one segment of queries and one of keys, extended to block boundaries.

    ``bounds``: the tile's band; ``binding``: those bounds that hide anything.
    """

    row: int
    segments: tuple[int, int]
    at: Rectangle
    bounds: Bounds
    binding: Bounds
    q_block: int
    k_block: int


@lru_cache(maxsize=1024)
def _backward_calls(table: bytes, q: Blocks, k: Blocks) -> tuple[Call, ...]:
    pieces = [piece for tile in read_tiles(table) for piece in _pieces(tile, q, k)]
    if q.shared and k.shared:
        return tuple(_of_shared(pieces, q, k))
    assert not (q.shared or k.shared), "either all segments are shared or none"
    same = [piece for piece in pieces if piece.segments[0] == piece.segments[1]]
    if len(same) <= 1:
        return tuple(_alone(piece) for piece in pieces)
    others = [_alone(piece) for piece in pieces if piece.segments[0] != piece.segments[1]]
    return (*_of_same(same, q, k), *others)


def _pieces(tile: Tile, q: Blocks, k: Blocks) -> Iterator[Piece]:
    q_shift, k_shift = tile.q_position - tile.q_offset, tile.k_position - tile.k_offset
    for of_q, q_start, q_stop in q.within(tile.row, tile.q_offset, tile.q_offset + tile.q_length):
        for of_k, k_start, k_stop in k.within(tile.row, tile.k_offset, tile.k_offset + tile.k_length):
            # Cut to visible pairs, then rounded to whole blocks; the bounds mask the extra tokens.
            first_k = max(k_start + k_shift, q_start + q_shift - tile.hi)
            last_k = min(k_stop + k_shift, q_stop + q_shift - tile.lo)
            first_q = max(q_start + q_shift, first_k + tile.lo)
            last_q = min(q_stop + q_shift, last_k + tile.hi)
            if first_k >= last_k or first_q >= last_q:
                continue
            at = Rectangle(
                q.floor(of_q, first_q - q_shift), last_q - q_shift, k.floor(of_k, first_k - k_shift), last_k - k_shift
            )
            behind = last_q - last_k
            bounds = Bounds(tile.hi - behind, behind - tile.lo)
            # A call computes whole blocks of queries: the rest of the last block must see nothing, too.
            last = min(of_q.stop, q.floor(of_q, at.q_stop - 1) + q.side)
            largest = last - 1 + q_shift - at.k_start - k_shift
            smallest = at.q_start + q_shift - at.k_stop + 1 - k_shift
            binding = Bounds(bounds.left if largest > tile.hi else None, bounds.right if smallest < tile.lo else None)
            blocks = q.block(of_q, at.q_start), k.block(of_k, at.k_start)
            yield Piece(tile.row, (of_q.number, of_k.number), at, bounds, binding, *blocks)


def _alone(piece: Piece) -> Dense:
    return Dense((piece.row, piece.row + 1), piece.at, piece.binding, piece.q_block, piece.k_block)


def _of_same(pieces: Sequence[Piece], q: Blocks, k: Blocks) -> Iterator[Packed]:
    """Joins pieces whose query and key segments have the same number: one call for each set of bounds."""
    by_band: dict[Bounds, list[Piece]] = {}
    for piece in pieces:
        by_band.setdefault(piece.bounds, []).append(piece)
    by_bounds: dict[Bounds, dict[int, Rectangle]] = {}
    for bounds, some in by_band.items():
        # A bound is used if any piece needs it; for the others it masks nothing.
        needed = Bounds(
            bounds.left if any(piece.binding.left is not None for piece in some) else None,
            bounds.right if any(piece.binding.right is not None for piece in some) else None,
        )
        entries = by_bounds.setdefault(needed, {})
        for piece in some:
            start, end = piece.row * q.tokens, piece.row * k.tokens
            at = piece.at
            entries[piece.segments[0]] = Rectangle(
                at.q_start + start, at.q_stop + start, at.k_start + end, at.k_stop + end
            )
    for bounds, entries in by_bounds.items():
        yield pack_call(bounds, entries)


def _of_shared(pieces: Iterable[Piece], q: Blocks, k: Blocks) -> Iterator[Dense]:
    by_row: dict[int, list[Dense]] = {}
    for piece in pieces:
        by_row.setdefault(piece.row, []).append(_alone(piece))
    return join_rows(by_row, q.side, k.side)


def join_rows(by_row: Mapping[int, list[Dense]], q_side: int, k_side: int) -> Iterator[Dense]:
    """Joins adjacent rectangles of a row, and rows with the same rectangles."""
    rows_of: dict[Dense, list[int]] = {}
    for row, dense in by_row.items():
        for call in join_blocks(dense, q_side, k_side):
            rows_of.setdefault(call._replace(rows=(0, 0)), []).append(row)
    for call, rows in rows_of.items():
        for some in _runs(rows):
            yield call._replace(rows=some)


def join_blocks(calls: list[Dense], q_side: int, k_side: int) -> list[Dense]:
    """Joins rectangles whose blocks follow each other without padding."""
    for i, one in enumerate(calls):
        for j, other in enumerate(calls):
            both = _beside(one, other, k_side) or _below(one, other, q_side)
            if i != j and both is not None:
                rest = [call for n, call in enumerate(calls) if n not in (i, j)]
                return join_blocks([*rest, both], q_side, k_side)
    return calls


def _beside(one: Dense, other: Dense, side: int) -> Dense | None:
    """Joins two rectangles of the same queries if all keys of ``one`` are visible and end where ``other``'s begin."""
    (q_start, q_stop, k_start, middle), at = one.at, other.at
    if (q_start, q_stop, middle) != at[:3] or one.bounds != FREE or other.bounds.left is not None:
        return None
    if one.k_block * side + middle - k_start != other.k_block * side:
        return None
    right = other.bounds.right
    if right is not None and q_start + at.k_stop - q_stop + right < middle - 1:
        return None  # the bound would hide keys of `one` from the first query
    return one._replace(at=at._replace(k_start=k_start), bounds=other.bounds)


def _below(one: Dense, other: Dense, side: int) -> Dense | None:
    """Joins two rectangles whose keys begin alike if the queries of ``one`` end where ``other``'s begin."""
    (q_start, middle, k_start, k_stop), at = one.at, other.at
    if (middle, k_start) != (at.q_start, at.k_start) or one.q_block * side + middle - q_start != other.q_block * side:
        return None
    alike = one.bounds == other.bounds == FREE and k_stop == at.k_stop
    diagonal = one.bounds.causal and other.bounds.causal and k_stop - middle == at.k_stop - at.q_stop
    return one._replace(at=at._replace(q_start=q_start), bounds=other.bounds) if alike or diagonal else None
