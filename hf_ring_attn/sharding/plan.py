"""A plan: the mask and the layout as seen by one rank, in one table of integers that an op can take.

If every rank sees little of the row (a window, short documents), the plan is `sparse`: each rank receives only the keys
that it sees, in order of position and without gaps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.ring import Ring
from ..comm.sparse_exchange import Exchange
from .layout import Layout, Owners, Run
from .mask import Mask, segments, tiles

KEY_BLOCK = 384
"""The gathered forward's tiles begin at a multiple of this in their document: a multiple of every kernel's block of
keys, so that a query under a window meets its keys in the same blocks at every ring size, and gets the same bits."""

SPARSE_SHARE = 0.5
"""A plan is sparse if no rank sees more than this share of the other ranks' keys. A ring pass sends keys W - 1 times
and float32 gradients W times, in large messages; a sparse exchange sends small, unequal ones."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A mask and a layout for one rank, as a table that ops can take. Built once per batch and mask.

    A sparse plan has as many stops as a dense one: torch.compile makes a new graph for each new length of a tensor, and
    for lengths 0 and 1.

    Args:
        ring: the name of the ring.
        tiles: [N, 9], the sections of `Tables` one after the other.
        stops: int64 on the CPU, the end of each section of ``tiles``; then, in a sparse plan, the most keys that a rank
            sees, else 0.
        holes: as in `Request`.
    """

    ring: str
    tiles: Tensor
    stops: Tensor
    holes: bool = False

    @classmethod
    def of(cls, ring: Ring, layout: Layout, mask: Mask, sparse_share: float | None = None) -> Plan:
        """The plan of this rank.

        Args:
            sparse_share: in place of `SPARSE_SHARE`; 0 for a plan that is not sparse.
        """
        share = SPARSE_SHARE if sparse_share is None else sparse_share
        few = _sparse(layout, mask, share) if ring.size > 1 else None
        most, sections = (0, _dense(layout, mask)) if few is None else few
        lengths = [len(section) for section in sections]
        lengths += [0] * (4 + 2 * ring.size - len(sections) if ring.size > 1 else 0)
        stops = torch.tensor([*itertools.accumulate(lengths), most], device="cpu")
        return cls(ring.name, torch.cat(sections), stops, mask.holes)

    @classmethod
    def cached(cls, ring: Ring, layout: Layout, mask: Mask) -> Plan:
        """The plan of this rank, made once for all layers and batches with this mask. ``ring``: not a simulated one."""
        if active_fake_mode() is not None:  # its plan has fake tensors
            return cls.of(ring, layout, mask)
        return _cached(ring.name, layout, mask, SPARSE_SHARE)

    @property
    def tables(self) -> Tables:
        """The sections, parsed once for the life of ``tiles``: kernels cache results by these tensors."""
        known: Tables | None = _KNOWN.get(self.tiles)
        if known is None:
            known = _KNOWN[self.tiles] = Tables.parse(self.tiles, self.stops)
        return known


@functools.lru_cache(maxsize=16)  # kernels' tables for a plan, on the GPU, live as long as it does
def _cached(ring: str, layout: Layout, mask: Mask, sparse_share: float) -> Plan:
    with torch.inference_mode(False):  # cached for calls that may train
        return Plan.of(Ring(ring), layout, mask, sparse_share)


class SegmentTable(NamedTuple):
    """Segments as in `Place`: [n, 3], and a flag: shared by every batch row and every rank's tensor."""

    table: Tensor
    shared: bool

    @classmethod
    def of(cls, section: Tensor) -> SegmentTable:
        """Parses a section [n, 9]: three columns, the shared flag, and zeros."""
        return cls(section[:, :3].contiguous(), bool(section[:, 3].any()))


@dataclass(frozen=True, eq=False)
class Tables:
    """A plan's sections.

    Args:
        forward: tiles of this rank's queries against the whole row, or against the keys that it sees.
        queries, keys: the segments of this rank's queries, and of the keys of ``forward``.
        backward: tiles against the keys of rank 0, 1, ...; segments: of these keys. None in a sparse plan.
        exchange: in a sparse plan, the keys to send to each rank.
        owners: as in `Layout`, for a gather of the whole row; () in a sparse plan, which needs none.
        most: in a sparse plan, the most keys that a rank sees.
    """

    forward: Tensor
    queries: SegmentTable
    keys: SegmentTable
    backward: Sequence[Tensor] = ()
    segments: Sequence[SegmentTable] = ()
    exchange: Exchange | None = None
    owners: Owners = ()
    most: int = 0

    @classmethod
    def parse(cls, table: Tensor, stops: Tensor) -> Tables:
        # Copies: a view would keep the table alive, and so its entry in `_KNOWN`.
        forward, of_queries, of_keys, *rest = (section.clone() for section in table.tensor_split(stops[:-2]))
        queries, keys = SegmentTable.of(of_queries), SegmentTable.of(of_keys)
        ring_size = len(rest) // 2
        if not rest:
            return cls(forward, queries, keys, [forward], [keys])
        if stops[-1]:
            exchange = Exchange.of(rest[0], rest[1], ring_size)
            return cls(forward, queries, keys, exchange=exchange, most=int(stops[-1]))
        *rest, owners = rest
        of_ranks = [SegmentTable.of(x) for x in rest[ring_size:]]
        return cls(forward, queries, keys, rest[:ring_size], of_ranks, owners=tuple(owners[:, 0].tolist()))


_KNOWN = WeakIdKeyDictionary()


def _dense(layout: Layout, mask: Mask) -> list[Tensor]:
    """The sections of a dense plan: three, and in a ring of several ranks 2 * W + 1 more."""
    queries, whole, ranks = layout.runs(), layout.whole(), range(layout.world_size)
    sections = [
        tiles(mask, queries, whole, KEY_BLOCK), _local_segments(mask, layout, layout.rank, keys=False),
        _segments(mask, whole, keys=True),
    ]  # fmt: skip
    if layout.world_size > 1:
        sections += [tiles(mask, queries, layout.runs(source)) for source in ranks]
        of_ranks = [_local_segments(mask, layout, source, keys=True) for source in ranks]
        # Accumulators that are sent on have one size, which depends on the number of segments.
        most = max(len(table) for table in of_ranks)
        sections += [torch.nn.functional.pad(table, (0, 0, 0, most - len(table))) for table in of_ranks]
        sections.append(_columns(torch.tensor(layout.owners, dtype=torch.int64, device="cpu").reshape(-1, 1)))
    return sections


def _sparse(layout: Layout, mask: Mask, share: float) -> tuple[int, list[Tensor]] | None:
    """The most keys that a rank sees (at least 1) and five sections; None if a rank sees more than ``share`` of the
    others' keys."""
    ranks = range(layout.world_size)
    seen: list[tuple[Run, ...]] = []
    for rank in ranks:
        seen.append(seen_keys(mask, layout, rank))
        own = sum(length for _, length, _ in _pieces(seen[-1], layout.runs(rank)))
        others = sum(run.length for run in seen[-1]) - own
        if share == 0 or others > share * (layout.padded - layout.local_length):
            return None
    queries, keys = layout.runs(), seen[layout.rank]
    sends = [(rank, *piece[:2]) for rank in ranks for piece in _pieces(seen[rank], queries)]
    receives = [(rank, to, length) for rank in ranks for _, length, to in _pieces(keys, layout.runs(rank))]
    return max(1, *(sum(run.length for run in runs) for runs in seen)), [
        tiles(mask, queries, keys, KEY_BLOCK), _local_segments(mask, layout, layout.rank, keys=False),
        _segments(mask, keys, keys=True),
        *(_columns(torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 3)) for rows in (sends, receives)),
    ]  # fmt: skip


def seen_keys(mask: Mask, layout: Layout, rank: int) -> tuple[Run, ...]:
    """The keys that some query of a rank sees, in any batch row, in order: the runs of a tensor of just these."""
    table = tiles(mask, layout.runs(rank), layout.whole(), KEY_BLOCK)
    runs: list[Run] = []
    for start, length in sorted(set(map(tuple, table[:, [6, 5]].tolist()))):
        last = runs[-1] if runs else Run(0, 0, 0)
        stop = last.position + last.length
        if runs and start <= stop:
            runs[-1] = last._replace(length=max(stop, start + length) - last.position)
        else:
            runs.append(Run(last.offset + last.length, start, length))
    return tuple(runs)


def _pieces(wanted: Sequence[Run], held: Sequence[Run]) -> list[tuple[int, int, int]]:
    """The overlaps of two lists of runs: offset in ``held``, length, offset in ``wanted``."""
    pieces = []
    for want in wanted:
        for have in held:
            start = max(want.position, have.position)
            stop = min(want.position + want.length, have.position + have.length)
            if start < stop:
                offsets = have.offset + start - have.position, want.offset + start - want.position
                pieces.append((offsets[0], stop - start, offsets[1]))
    return pieces


def _local_segments(mask: Mask, layout: Layout, rank: int, keys: bool) -> Tensor:
    """The segments of a rank's tokens."""
    if not mask.one_document or layout.world_size == 1:
        return _segments(mask, layout.runs(rank), keys)
    # One segment a chunk, even if chunks touch: shared segments must be equal on all ranks.
    chunks = [Run(number * layout.chunk, 0, layout.chunk) for number in range(layout.chunks)]
    return _segments(mask, chunks, keys)


def _segments(mask: Mask, runs: Sequence[Run], keys: bool) -> Tensor:
    if not mask.one_document:
        return _columns(segments(mask, runs, keys))
    # All rows share these segments. A row's end needs no cut, since the padding after it is masked.
    table = torch.tensor([[0, run.offset, run.length, 1] for run in runs], dtype=torch.int64, device="cpu")
    return _columns(table.reshape(-1, 4))


def _columns(table: Tensor) -> Tensor:
    """Widens a table to the nine columns of tiles."""
    return torch.nn.functional.pad(table, (0, 9 - table.shape[1]))
