"""Tables of tiles as calls of FlashAttention 2: as few as can be, made once per table.

Its masks are flash-attn-4's (`flash4.calls`), but for two traps (flash-attention's issue 895): a bound as wide as the
keys or wider counts as none, and beside a bound on the other side none counts as one as wide as the keys. Either is
wrong only where a bound hides something and queries outnumber keys by two or more, so such tiles are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from ...sharding.mask import UNBOUNDED, Tile
from ..flash4.calls import DENSE_AT_MOST, Bounds, Call, Dense, Rectangle, of_rows, packed, read, rectangle

JOINED_AT_MOST = 8
"""More rectangles of one batch row than this are not looked at for neighbours: they are documents."""

MOST_ENTRIES = 65535
"""Of a packed call: they are one dim of a CUDA grid."""


class Plan(NamedTuple):
    """The calls of a table. ``once``: no query is in two of its tiles, so that their softmaxes are whole."""

    calls: tuple[Call, ...]
    once: bool


def plan(tiles: Tensor, queries: int, keys: int) -> Plan:
    """The calls for tensors of so many queries and keys in a batch row."""
    return _plan(tiles.contiguous().numpy().tobytes(), queries, keys)


@lru_cache(maxsize=1024)
def _plan(table: bytes, queries: int, keys: int) -> Plan:
    tiles = sorted(read(table))
    once = all(a.row < b.row or a.q_offset + a.q_length <= b.q_offset for a, b in pairwise(tiles))
    entries = [(part.row, *rectangle(part)) for tile in tiles for part in _cut(tile)]
    by_row: dict[int, list[Dense]] = {}
    for row, at, bounds in entries:
        by_row.setdefault(row, []).append(_dense(row, at, bounds))
    if all(len(dense) <= JOINED_AT_MOST for dense in by_row.values()):
        few = tuple(of_rows(by_row, 1, 1))
        if len(few) <= DENSE_AT_MOST:
            return Plan(few, once)
    return Plan(tuple(_chains(entries, queries, keys)), once)


def _cut(tile: Tile) -> Iterator[Tile]:
    """A tile as tiles that are out of the traps: at most one query more than keys, or nothing hidden and no bounds."""
    first, stop = tile.q_position, tile.q_position + tile.q_length
    first_key, last_key = tile.k_position, tile.k_position + tile.k_length - 1
    if tile.q_length <= tile.k_length + 1:
        yield tile
        return
    # From `all_seen` on a query sees the last key and all before it; from `first_lost` on it no longer sees the first.
    # The queries before the one, and those from the other on, are no more than there are keys.
    all_seen, first_lost = last_key + 1 + tile.lo, first_key + 1 + tile.hi
    cuts = [all_seen] if first - last_key < tile.lo else []
    if first_lost > all_seen and stop - 1 - first_key > tile.hi:
        cuts.append(first_lost)
    edges = [first, *(cut for cut in cuts if first < cut < stop), stop]
    for start, end in pairwise(edges):
        part = tile._replace(q_offset=tile.q_offset + start - first, q_length=end - start, q_position=start)
        if part.q_length > part.k_length + 1:
            assert start - last_key >= tile.lo and end - 1 - first_key <= tile.hi, "something is hidden"
            part = part._replace(lo=-UNBOUNDED, hi=UNBOUNDED)
        yield part


def _dense(row: int, at: Rectangle, bounds: Bounds) -> Dense:
    """One rectangle, with those of its bounds that hide anything: without any it is faster. Its blocks are tokens."""
    left = bounds.left if bounds.left is not None and bounds.left < at.k_stop - at.k_start - 1 else None
    right = bounds.right if bounds.right is not None and bounds.right < at.q_stop - at.q_start - 1 else None
    return Dense((row, row + 1), at, Bounds(left, right), at.q_start, at.k_start)


def _chains(entries: Iterable[tuple[int, Rectangle, Bounds]], queries: int, keys: int) -> Iterator[Call]:
    """A call for each chain: rectangles of the same bounds that have no query and no key in common.

    So what a call adds to a gradient it adds once, and its bits do not depend on who is first.
    """
    chains: dict[Bounds, list[list[tuple[int, Rectangle]]]] = {}
    for row, at, bounds in entries:
        of_bounds = chains.setdefault(bounds, [])
        for chain in of_bounds:
            last_row, last = chain[-1]
            apart = last_row < row or (last.q_stop <= at.q_start and last.k_stop <= at.k_start)
            if apart and len(chain) < MOST_ENTRIES:
                chain.append((row, at))
                break
        else:
            of_bounds.append([(row, at)])
    for bounds, of_bounds in chains.items():
        for chain in of_bounds:
            if len(chain) == 1:
                ((row, at),) = chain
                yield _dense(row, at, bounds)
            else:
                yield packed(bounds, dict(enumerate(_joined_rows(row, at, queries, keys) for row, at in chain)))


def _joined_rows(row: int, at: Rectangle, queries: int, keys: int) -> Rectangle:
    """A rectangle of a batch row in tensors whose rows lie one after the other."""
    q, k = row * queries, row * keys
    return Rectangle(at.q_start + q, at.q_stop + q, at.k_start + k, at.k_stop + k)
