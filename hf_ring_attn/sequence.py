"""Layers that look along the row by other means than attention: what a rank must be given to compute its share exactly.

A short convolution needs the few tokens before each of this rank's runs: they come from their owners (`along`). A
recurrence needs its row from the first token on, but each of its heads for itself: ranks exchange their tokens of all
heads for whole rows of some heads, run what one device runs, and exchange back (`by_heads`). Documents of packed rows
are computed one by one. Both are differentiable; a value that went to several ranks gets their gradients' float32 sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .comm import Ring
from .exchange import Exchange
from .layout import Layout

ALL = slice(None)


class Piece(NamedTuple):
    """Tokens start <= position < stop of a document, in these batch rows."""

    rows: slice
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a batch that a ring shares.

    Args:
        documents: [B, S padded] ids on the CPU, -1 for padding of the ring; None: each row is one document.
    """

    ring: Ring
    layout: Layout
    documents: Tensor | None = None

    def pieces(self) -> list[list[Piece]]:
        """The documents, without padding of the ring: a list a batch row, or one for all where all are one document."""
        length = self.layout.length
        ids = None if self.documents is None else self.documents[:, :length]
        if ids is None or not length or bool((ids == ids[:, :1]).all()):
            return [[Piece(ALL, 0, length)]]
        return [_runs_of(row, slice(at, at + 1)) for at, row in enumerate(ids)]


def _runs_of(ids: Tensor, rows: slice) -> list[Piece]:
    stops = torch.unique_consecutive(ids, return_counts=True)[1].cumsum(0).tolist()
    return [Piece(rows, start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


# ---- the tokens before a run -----------------------------------------------------------------------------------------


def along(x: Tensor, rows: Rows, reach: int, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``compute`` gives where each token's result depends on it and on the ``reach`` tokens before it.

    Args:
        x: [B, T, C] of this rank's tokens.
        compute: from [b, n, C] of consecutive tokens of a document to [b, n, C']; before the first, it takes none.

    Returns:
        [B, T, C']. In padding of the ring arbitrary numbers, which depend on padding only.
    """
    x, before = _with_tokens_before(x, rows, reach)
    places = _needed(rows.layout, reach, rows.layout.rank)
    results = []
    padding = Piece(ALL, rows.layout.length, rows.layout.padded)
    for documents in rows.pieces():
        mine = []
        for offset, position, length in rows.layout.runs():
            for piece in (*documents, padding):
                first, stop = max(piece.start, position), min(piece.stop, position + length)
                if first >= stop:
                    continue
                own = x[documents[0].rows, offset + first - position : offset + stop - position]
                count = min(reach, first - piece.start)  # 0 unless the document began before the run
                if count:
                    at = _place(places, first - count)
                    own = torch.cat([before[documents[0].rows, at : at + count], own], 1)
                mine.append(compute(own)[:, count:])
        results.append(mine[0] if len(mine) == 1 else torch.cat(mine, 1))
    return results[0] if len(results) == 1 else torch.cat(results)


Span = tuple[int, int]
"""Positions first <= position < stop of the row."""


def _needed(layout: Layout, reach: int, rank: int) -> list[Span]:
    """The positions before a rank's runs, each once, in order."""
    spans: list[Span] = []
    for run in layout.runs(rank):
        first, stop = max(0, run.position - reach), run.position
        if spans and first < spans[-1][1]:
            first = spans[-1][1]
        if first < stop:
            spans.append((first, stop))
    return spans


def _place(spans: Sequence[Span], position: int) -> int:
    """Where a position is in a tensor of the tokens of these spans."""
    place = 0
    for first, stop in spans:
        if position < stop:
            return place + position - first
        place += stop - first
    raise AssertionError(f"{position} is in none of {spans}")


@lru_cache(maxsize=64)
def _exchange(layout: Layout, reach: int) -> Exchange:
    """By which every rank of the layout gets the tokens before its runs."""
    sends = [
        (rank, run.offset + first - run.position, stop - first)
        for rank in range(layout.world_size)
        for run, first, stop in _moves(layout, reach, layout.rank, rank)
    ]
    spans = _needed(layout, reach, layout.rank)
    receives = [
        (rank, _place(spans, first), stop - first)
        for rank in range(layout.world_size)
        for _, first, stop in _moves(layout, reach, rank, layout.rank)
    ]
    tables = [torch.tensor(table, dtype=torch.int64).reshape(-1, 3) for table in (sends, receives)]
    return Exchange.of(*tables, layout.world_size)


def _moves(layout: Layout, reach: int, source: int, target: int) -> Iterator[tuple[Any, int, int]]:
    """What ``source`` holds of what ``target`` needs: the run, and the first position and the stop."""
    for run in layout.runs(source):
        for start, end in _needed(layout, reach, target):
            first, stop = max(start, run.position), min(end, run.position + run.length)
            if first < stop:
                yield run, first, stop


def _with_tokens_before(x: Tensor, rows: Rows, reach: int) -> tuple[Tensor, Tensor]:
    """``x`` itself and [B, n, C], the tokens at the positions `_needed`."""
    if rows.ring.size == 1 or reach == 0:
        return x, x[:, :0]
    both: tuple[Tensor, Tensor] = _Before.apply(x, rows, _exchange(rows.layout, reach))  # type: ignore[no-untyped-call]
    return both


class _Before(torch.autograd.Function):
    """Gives its input on, too, so that every rank takes part in the backward, also one that needs no token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.rows, ctx.exchange = rows, exchange
        return x.view_as(x), exchange.arrived(exchange.take(rows.ring, x).wait()[0])

    @staticmethod
    def backward(ctx: Any, own: Tensor, before: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        back = ctx.exchange.give_back(ctx.rows.ring, _wide(before), own.shape[1])
        return (_wide(own) + back).to(own.dtype), None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# ---- whole rows of some heads ----------------------------------------------------------------------------------------

Compute = Callable[[list[Tensor], list[Tensor], list[Tensor]], Tensor]


def by_heads(
    rows: Rows, heads: Sequence[Tensor], shared: Sequence[Tensor], weights: Sequence[Tensor], compute: Compute
) -> Tensor:
    """What ``compute`` gives for whole documents, where each head's result depends on its own inputs only.

    Args:
        heads: [B, T, H, ...] of this rank's tokens.
        shared: [B, T, G, ...] likewise; each of the G serves H / G heads that follow one another.
        weights: [H, ...], the same on every rank: a rank's gradient is its share.
        compute: from these three, of n tokens of a document and of h heads with g among the shared, to [b, n, h, ...].

    Returns:
        [B, T, H, ...]; zeros in padding of the ring.
    """
    total = heads[0].shape[2]
    ranges = _ranges(total, [x.shape[2] for x in shared], rows.ring.size)
    lo, hi = ranges[rows.ring.rank]
    parts = [ranges] * len(heads) + [_groups(ranges, total // x.shape[2]) for x in shared]
    whole = _to_heads([*heads, *shared], parts, rows)
    mine, common = whole[: len(heads)], whole[len(heads) :]
    common = [
        _for_heads(x, lo, hi, total // given.shape[2]) for x, given in zip(common, shared, strict=True)
    ]
    own = [weight[lo:hi] for weight in weights]
    out = _of_documents(rows, mine, common, own, compute) if lo < hi else _of_none(mine, common, own, compute)
    return _to_tokens(out, ranges, rows)


def _of_documents(
    rows: Rows, heads: list[Tensor], shared: list[Tensor], weights: list[Tensor], compute: Compute
) -> Tensor:
    results = []
    for documents in rows.pieces():
        each = [
            compute([x[at, start:stop] for x in heads], [x[at, start:stop] for x in shared], weights)
            for at, start, stop in documents
        ]
        results.append(each[0] if len(each) == 1 else torch.cat(each, 1))
    return results[0] if len(results) == 1 else torch.cat(results)


def _of_none(heads: list[Tensor], shared: list[Tensor], weights: list[Tensor], compute: Compute) -> Tensor:
    """Of a rank that has no head: nothing, of the shape and dtype that others have, and tied to all inputs, so that
    their gradients are asked for on every rank."""
    with torch.no_grad():
        one = [x.new_zeros(1, 1, 1, *x.shape[3:]) for x in (*heads, *shared)]
        like = compute(one[: len(heads)], one[len(heads) :], [x.new_zeros(1, *x.shape[1:]) for x in weights])
    tie = sum((x.sum().to(like.dtype) for x in (*heads, *shared, *weights)), like.new_zeros(()))
    return like.new_zeros(*heads[0].shape[:2], 0, *like.shape[3:]) + tie


def _ranges(heads: int, groups: Sequence[int], ranks: int) -> list[Span]:
    """The heads of each rank, as even as can be; where there are enough of them, whole groups that share inputs."""
    unit = max((heads // group for group in groups), default=1)
    if heads // unit < ranks:
        unit = 1
    count = heads // unit
    bounds = [unit * (count * rank // ranks) for rank in range(ranks + 1)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def _groups(ranges: list[Span], size: int) -> list[Span]:
    """The groups of ``size`` heads that serve each rank's heads."""
    return [(lo // size, -(-hi // size)) if lo < hi else (0, 0) for lo, hi in ranges]


def _for_heads(x: Tensor, lo: int, hi: int, size: int) -> Tensor:
    """[b, n, g, ...] of the groups that serve the heads lo to hi; one for each head where they serve unlike numbers."""
    group = [head // size for head in range(lo, hi)]
    counts = {group.count(at) for at in group}
    if len(counts) <= 1:
        return x
    return x.index_select(2, torch.tensor(group, device=x.device) - group[0])


def _to_heads(tensors: list[Tensor], parts: list[list[Span]], rows: Rows) -> list[Tensor]:
    """From [B, T, N, ...] of this rank's tokens, [B, S, n, ...] without padding of the ring, n as ``parts`` tells."""
    if rows.ring.size == 1:
        return tensors
    whole: tuple[Tensor, ...] = _ToHeads.apply(rows, parts, *tensors)  # type: ignore[no-untyped-call]
    return [x[:, : rows.layout.length] for x in whole]


def _to_tokens(x: Tensor, ranges: list[Span], rows: Rows) -> Tensor:
    """From [B, S, n, ...], [B, T, N, ...]."""
    if rows.ring.size == 1:
        return x
    tokens: Tensor = _ToTokens.apply(rows, ranges, rows.layout.pad(x, 1))  # type: ignore[no-untyped-call]
    return tokens


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, parts: list[list[Span]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.rows, ctx.parts, ctx.counts = rows, parts, [x.shape[2] for x in tensors]
        return tuple(_gather_heads(rows, tensors, parts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, *_scatter_tokens(ctx.rows, gradients, ctx.parts, ctx.counts)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, ranges: list[Span], x: Tensor) -> Tensor:
        ctx.rows, ctx.ranges = rows, ranges
        return _scatter_tokens(rows, [x], [ranges], [ranges[-1][1]])[0].contiguous()  # as on one device: some view it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, _gather_heads(ctx.rows, [gradient], [ctx.ranges])[0]


def _gather_heads(rows: Rows, tensors: Sequence[Tensor], parts: Sequence[list[Span]]) -> list[Tensor]:
    """[B, T, N, ...] of this rank's tokens to [B, S padded, n, ...] of its heads."""
    size, pending = rows.ring.size, []
    for x, part in zip(tensors, parts, strict=True):
        by_head = x.movedim(2, 0)
        leaving = torch.cat([by_head[lo:hi] for lo, hi in part])
        lo, hi = part[rows.ring.rank]
        sends = [stop - start for start, stop in part]
        pending.append(rows.ring.all_to_all(leaving, sends, [hi - lo] * size, "exchanged tokens for heads"))
    arrived = [(one.wait()[0], part[rows.ring.rank]) for one, part in zip(pending, parts, strict=True)]
    return [rows.layout.merge(x.unflatten(0, (size, hi - lo)).movedim(1, 3)) for x, (lo, hi) in arrived]


def _scatter_tokens(
    rows: Rows, tensors: Sequence[Tensor], parts: Sequence[list[Span]], counts: Sequence[int]
) -> list[Tensor]:
    """The opposite: [B, S padded, n, ...] to [B, T, N, ...]; what went to several ranks is summed in their order."""
    size, pending = rows.ring.size, []
    for x, part in zip(tensors, parts, strict=True):
        leaving = rows.layout.split(x).movedim(3, 1).flatten(0, 1)
        lo, hi = part[rows.ring.rank]
        receives = [stop - start for start, stop in part]
        pending.append(rows.ring.all_to_all(leaving, [hi - lo] * size, receives, "exchanged heads for tokens"))
    return [
        _sum(one.wait()[0], part, count).movedim(0, 2) for one, part, count in zip(pending, parts, counts, strict=True)
    ]


def _sum(x: Tensor, part: list[Span], count: int) -> Tensor:
    """[n, ...] of the spans, one after another, to [N, ...]: summed where they overlap."""
    if sum(stop - start for start, stop in part) == count:
        return x
    total = torch.zeros(count, *x.shape[1:], dtype=_wide(x[:0]).dtype, device=x.device)
    for (lo, hi), piece in zip(part, x.split([stop - start for start, stop in part]), strict=True):
        total[lo:hi] += piece
    return total.to(x.dtype)
