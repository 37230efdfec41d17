"""What a mask and a layout mean for one rank of a ring, as one table of integers that an op can take.

Where every rank sees little of the row, as under a window or with short documents, a rank holds only the keys that it
sees, in order of their positions and without the gaps: they are `sparse`, and each rank is sent just these.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.ring import Ring
from ..comm.sparse_exchange import Exchange
from .layout import Layout, Owners, Run
from .mask import Mask, segments, tiles

KEY_BLOCK = 384
"""The gathered forward's tiles begin at a multiple of this in their document: a multiple of every kernel's block of
keys, so that a query under a window meets its keys in the same blocks at every ring size, and gets the same bits."""

SPARSE_SHARE = 0.5
"""Ranks are sent only the keys that they see where none of them sees more than this share of the others' keys. A ring
passes keys on W - 1 times and float32 gradients W times, in large messages; an exchange sends small, unequal ones."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a mask and a layout mean for the ring, as a table that ops can take. Built once per batch and mask.

    One table, and as many stops in a sparse plan, because a compiler makes a new graph for each tensor whose length is
    new, or is 0 or 1.

    Args:
        ring: the name of the ring.
        tiles: [N, 9], the sections of `Tables` one after the other.
        stops: int64 on the CPU, where in ``tiles`` each section ends, and then, of a sparse plan, how many keys a rank
            sees at most; 0 of others.
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
        stops = torch.tensor([*itertools.accumulate(lengths), most])
        return cls(ring.name, torch.cat(sections), stops, mask.holes)


class Segments(NamedTuple):
    """As in `Place`: [n, 3], and whether every batch row and every rank's tensor has the same."""

    table: Tensor
    shared: bool

    @classmethod
    def of(cls, section: Tensor) -> Segments:
        """From [n, 9]: the three columns, whether they are shared, and zeros."""
        return cls(section[:, :3].contiguous(), bool(section[:, 3].any()))


@dataclass(frozen=True, eq=False)
class Tables:
    """A plan's sections.

    Args:
        forward: tiles of this rank's queries against the whole row, or against the keys that it sees.
        queries, keys: the segments of this rank's queries, and of the keys of ``forward``.
        backward: tiles against the keys of rank 0, 1, ...; segments: of these keys. None in a sparse plan.
        exchange: of a sparse plan: who is sent which keys.
        owners: as in `Layout`, for a gather of the whole row; () in a sparse plan, which needs none.
        most: of a sparse plan: how many keys a rank sees at most.
    """

    forward: Tensor
    queries: Segments
    keys: Segments
    backward: Sequence[Tensor] = ()
    segments: Sequence[Segments] = ()
    exchange: Exchange | None = None
    owners: Owners = ()
    most: int = 0

    @classmethod
    def of(cls, table: Tensor, stops: Tensor, ring_size: int) -> Tables:
        """Read once per plan, so that what kernels keep for these very tensors is found again."""
        known: Tables | None = _KNOWN.get(table)
        if known is None:
            # Copies: a view would keep the table alive, and with it this entry.
            forward, of_queries, of_keys, *rest = (section.clone() for section in table.tensor_split(stops[:-2]))
            queries, keys = Segments.of(of_queries), Segments.of(of_keys)
            if ring_size == 1:
                known = cls(forward, queries, keys, [forward], [keys])
            elif stops[-1]:
                exchange = Exchange.of(rest[0], rest[1], ring_size)
                known = cls(forward, queries, keys, exchange=exchange, most=int(stops[-1]))
            else:
                *rest, owners = rest
                of_ranks = [Segments.of(x) for x in rest[ring_size:]]
                known = cls(forward, queries, keys, rest[:ring_size], of_ranks, owners=tuple(owners[:, 0].tolist()))
            _KNOWN[table] = known
        return known


_KNOWN = WeakIdKeyDictionary()


def _dense(layout: Layout, mask: Mask) -> list[Tensor]:
    """Three sections, and in a ring of several 2 * W + 1 more."""
    queries, whole, ranks = layout.runs(), layout.whole(), range(layout.world_size)
    sections = [
        tiles(mask, queries, whole, KEY_BLOCK), _local_segments(mask, layout, layout.rank, keys=False),
        _segments(mask, whole, keys=True),
    ]  # fmt: skip
    if layout.world_size > 1:
        sections += [tiles(mask, queries, layout.runs(source)) for source in ranks]
        of_ranks = [_local_segments(mask, layout, source, keys=True) for source in ranks]
        # Accumulators that travel have one size, which depends on how many segments there are.
        most = max(len(table) for table in of_ranks)
        sections += [torch.nn.functional.pad(table, (0, 0, 0, most - len(table))) for table in of_ranks]
        sections.append(_columns(torch.tensor(layout.owners, dtype=torch.int64).reshape(-1, 1)))
    return sections


def _sparse(layout: Layout, mask: Mask, share: float) -> tuple[int, list[Tensor]] | None:
    """How many keys a rank sees at most, 1 or more, and five sections; None where some rank sees more than this share
    of the other ranks' keys."""
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
        *(_columns(torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)) for rows in (sends, receives)),
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
    """What a holder has of wanted runs: where it begins there, its length, and where it begins in the wanted ones."""
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
    """The segments of what a rank holds."""
    if not mask.one_document or layout.world_size == 1:
        return _segments(mask, layout.runs(rank), keys)
    # As many on every rank, also where its chunks touch: what is shared is the same everywhere.
    chunks = [Run(number * layout.chunk, 0, layout.chunk) for number in range(layout.chunks)]
    return _segments(mask, chunks, keys)


def _segments(mask: Mask, runs: Sequence[Run], keys: bool) -> Tensor:
    if not mask.one_document:
        return _columns(segments(mask, runs, keys))
    # Those of one row serve all, and its end is no border: what lies beyond sees nothing and is not seen.
    table = torch.tensor([[0, run.offset, run.length, 1] for run in runs], dtype=torch.int64)
    return _columns(table.reshape(-1, 4))


def _columns(table: Tensor) -> Tensor:
    """[n, 9], as tiles are."""
    return torch.nn.functional.pad(table, (0, 9 - table.shape[1]))
