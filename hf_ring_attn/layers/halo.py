"""Halo exchange for layers that mix neighbouring tokens, such as a short convolution.

Each rank receives the few tokens before its runs from their owners. The exchange is differentiable: gradients of a
token are summed in float32 over ranks. Packed documents are computed one by one. For state along the whole row, see
`head_parallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.first_order import first_order_only
from ..comm.ring import Ring
from ..comm.sparse_exchange import Exchange
from ..dtypes import accumulate_dtype
from ..sharding.layout import Layout

ALL = slice(None)


class Piece(NamedTuple):
    """Tokens start <= position < stop of a document, in the batch rows ``rows``."""

    rows: slice
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class RowShare:
    """The rows of a batch that a ring shares.

    Args:
        documents: [B, S padded] ids on the CPU, -1 for padding of the ring; None: each row is one document.
        count: B, the number of rows; None: not known.
    """

    ring: Ring
    layout: Layout
    documents: Tensor | None = None
    count: int | None = None

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        """The documents without ring padding: one list per batch row, or one for all rows of a single document."""
        length = self.layout.length
        ids = None if self.documents is None else self.documents[:, :length]
        if ids is None or not length or bool((ids == ids[:, :1]).all()):
            return [[Piece(ALL, 0, length)]]
        return [_runs_of(row, slice(at, at + 1)) for at, row in enumerate(ids)]


def _runs_of(ids: Tensor, rows: slice) -> list[Piece]:
    stops = torch.unique_consecutive(ids, return_counts=True)[1].cumsum(0).tolist()
    return [Piece(rows, start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def compute_with_halo(x: Tensor, rows: RowShare, reach: int, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies ``compute``, whose result for a token depends on it and on the ``reach`` tokens before it.

    Args:
        x: [B, T, C] of this rank's tokens.
        compute: maps [b, n, C] of consecutive tokens of a document to [b, n, C'], with nothing before the first.

    Returns:
        [B, T, C']. Ring padding holds arbitrary numbers, which depend on padding only.
    """
    x, before = _with_tokens_before(x, rows, reach)
    places = _needed(rows.layout, reach, rows.layout.rank)
    results = []
    padding = Piece(ALL, rows.layout.length, rows.layout.padded)
    for documents in rows.pieces:
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
    """The index of a position in a tensor of these spans' tokens."""
    place = 0
    for first, stop in spans:
        if position < stop:
            return place + position - first
        place += stop - first
    raise AssertionError(f"{position} is in none of {spans}")


@lru_cache(maxsize=64)
def _exchange(layout: Layout, reach: int) -> Exchange:
    """The exchange that sends each rank the tokens before its runs."""
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
    leaving, coming = (
        torch.tensor(table, dtype=torch.int64, device="cpu").reshape(-1, 3) for table in (sends, receives)
    )
    return Exchange.of(leaving, coming, layout.world_size)


def _moves(layout: Layout, reach: int, source: int, target: int) -> Iterator[tuple[Any, int, int]]:
    """Yields the tokens that ``source`` sends to ``target``: the run, the first position and the stop."""
    for run in layout.runs(source):
        for start, end in _needed(layout, reach, target):
            first, stop = max(start, run.position), min(end, run.position + run.length)
            if first < stop:
                yield run, first, stop


def _with_tokens_before(x: Tensor, rows: RowShare, reach: int) -> tuple[Tensor, Tensor]:
    """Returns ``x`` and [B, n, C], the tokens at the positions `_needed`."""
    if rows.ring.size == 1 or reach == 0:
        return x, x[:, :0]
    both: tuple[Tensor, Tensor] = _Before.apply(x, rows, _exchange(rows.layout, reach))  # type: ignore[no-untyped-call]
    return both


class _Before(torch.autograd.Function):
    """Returns its input, too, so that every rank joins the backward, also one that needs no token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowShare, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.rows, ctx.exchange = rows, exchange
        return x.view_as(x), exchange.arrived(exchange.take(rows.ring, x).wait()[0])

    @staticmethod
    @first_order_only("a layer that takes tokens of other ranks")
    def backward(ctx: Any, _saved: tuple[()], own: Tensor, before: Tensor) -> tuple[Tensor | None, ...]:
        wide = accumulate_dtype(own.dtype)
        back = ctx.exchange.give_back(ctx.rows.ring, before.to(wide), own.shape[1])
        return (own.to(wide) + back).to(own.dtype), None, None
