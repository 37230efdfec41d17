"""Head parallelism for layers that carry state along the row, each head by itself.

An all-to-all shards heads instead of tokens: a rank gets whole rows of some heads, computes as one device does, and a
second all-to-all returns the results. Work and memory per rank stay the same. The exchange is differentiable: gradients
of an input that was sent to several ranks are summed in float32. Packed documents are computed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..comm.first_order import first_order_only
from ..comm.ring import Pending
from ..dtypes import accumulate_dtype
from .halo import RowShare, Span

Compute = Callable[[list[Tensor], list[Tensor], list[Tensor]], Tensor]


def compute_by_heads(
    rows: RowShare, heads: Sequence[Tensor], shared: Sequence[Tensor], weights: Sequence[Tensor], compute: Compute
) -> Tensor:
    """Applies ``compute`` to whole documents; each head's result must depend on its own inputs only.

    Args:
        heads: [B, T, H, ...] of this rank's tokens.
        shared: [B, T, G, ...] likewise; each of the G serves H / G consecutive heads.
        weights: [H, ...], the same on every rank; a rank's gradient is its share.
        compute: maps these three, for n tokens of a document, h heads and g shared ones, to [b, n, h, ...].

    Returns:
        [B, T, H, ...]; zeros in ring padding.
    """
    total = heads[0].shape[2]
    ranges = head_ranges(total, [x.shape[2] for x in shared], rows.ring.size)
    lo, hi = ranges[rows.ring.rank]
    parts = [ranges] * len(heads) + [shared_ranges(ranges, total // x.shape[2]) for x in shared]
    whole = _to_heads([*heads, *shared], parts, rows)
    mine, common = whole[: len(heads)], whole[len(heads) :]
    common = [_for_heads(x, lo, hi, total // given.shape[2]) for x, given in zip(common, shared, strict=True)]
    own = [weight[lo:hi] for weight in weights]
    out = _of_documents(rows, mine, common, own, compute) if lo < hi else _of_none(mine, common, own, compute)
    return _to_tokens(out, ranges, rows)


def _of_documents(
    rows: RowShare, heads: list[Tensor], shared: list[Tensor], weights: list[Tensor], compute: Compute
) -> Tensor:
    results = []
    for documents in rows.pieces:
        each = [
            compute([x[at, start:stop] for x in heads], [x[at, start:stop] for x in shared], weights)
            for at, start, stop in documents
        ]
        results.append(each[0] if len(each) == 1 else torch.cat(each, 1))
    return results[0] if len(results) == 1 else torch.cat(results)


def _of_none(heads: list[Tensor], shared: list[Tensor], weights: list[Tensor], compute: Compute) -> Tensor:
    """An empty result for a rank without heads, connected to all inputs so that autograd runs on every rank."""
    with torch.no_grad():
        one = [x.new_zeros(1, 1, 1, *x.shape[3:]) for x in (*heads, *shared)]
        like = compute(one[: len(heads)], one[len(heads) :], [x.new_zeros(1, *x.shape[1:]) for x in weights])
    tie = sum((x.sum().to(like.dtype) for x in (*heads, *shared, *weights)), like.new_zeros(()))
    return like.new_zeros(*heads[0].shape[:2], 0, *like.shape[3:]) + tie


def head_ranges(heads: int, groups: Sequence[int], ranks: int) -> list[Span]:
    """Splits the heads over ranks evenly, by whole groups that share inputs if there are enough of them."""
    unit = max((heads // group for group in groups), default=1)
    if heads // unit < ranks:
        unit = 1
    count = heads // unit
    bounds = [unit * (count * rank // ranks) for rank in range(ranks + 1)]
    return list(pairwise(bounds))


def shared_ranges(ranges: list[Span], size: int) -> list[Span]:
    """Returns the groups of ``size`` heads that serve each rank's heads."""
    return [(lo // size, -(-hi // size)) if lo < hi else (0, 0) for lo, hi in ranges]


def _for_heads(x: Tensor, lo: int, hi: int, size: int) -> Tensor:
    """Expands groups [b, n, g, ...] to the heads lo to hi if they serve unequal numbers of heads."""
    group = [head // size for head in range(lo, hi)]
    counts = {group.count(at) for at in group}
    if len(counts) <= 1:
        return x
    return x.index_select(2, torch.tensor(group, device=x.device) - group[0])


def _to_heads(tensors: list[Tensor], parts: list[list[Span]], rows: RowShare) -> list[Tensor]:
    """All-to-all from [B, T, N, ...] of this rank's tokens to [B, S, n, ...] of its heads, without ring padding."""
    if rows.ring.size == 1:
        return tensors
    whole: tuple[Tensor, ...] = _ToHeads.apply(rows, parts, *tensors)  # type: ignore[no-untyped-call]
    return [x[:, : rows.layout.length] for x in whole]


def _to_tokens(x: Tensor, ranges: list[Span], rows: RowShare) -> Tensor:
    """All-to-all from [B, S, n, ...] back to [B, T, N, ...]."""
    if rows.ring.size == 1:
        return x
    tokens: Tensor = _ToTokens.apply(rows, ranges, rows.layout.pad(x, 1))  # type: ignore[no-untyped-call]
    return tokens


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: RowShare, parts: list[list[Span]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.rows, ctx.parts, ctx.counts = rows, parts, [x.shape[2] for x in tensors]
        return tuple(_gather_heads(rows, tensors, parts))

    @staticmethod
    @first_order_only("a layer whose ranks share heads")
    def backward(ctx: Any, _saved: tuple[()], *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_scatter_tokens(ctx.rows, gradients, ctx.parts, ctx.counts)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: RowShare, ranges: list[Span], x: Tensor) -> Tensor:
        ctx.rows, ctx.ranges = rows, ranges
        return _scatter_tokens(rows, [x], [ranges], [ranges[-1][1]])[0].contiguous()  # as on one device: some view it

    @staticmethod
    @first_order_only("a layer whose ranks share heads")
    def backward(ctx: Any, _saved: tuple[()], gradient: Tensor) -> tuple[Any, ...]:
        return None, None, _gather_heads(ctx.rows, [gradient], [ctx.ranges])[0]


def _gather_heads(rows: RowShare, tensors: Sequence[Tensor], parts: Sequence[list[Span]]) -> list[Tensor]:
    """[B, T, N, ...] of this rank's tokens to [B, S padded, n, ...] of its heads."""
    size, pending = rows.ring.size, []
    for x, part in zip(tensors, parts, strict=True):
        by_head = x.movedim(2, 0)
        leaving = torch.cat([by_head[lo:hi] for lo, hi in part])
        lo, hi = part[rows.ring.rank]
        sends = [stop - start for start, stop in part]
        pending.append(rows.ring.all_to_all(leaving, sends, [hi - lo] * size, "exchanged tokens for heads"))
    return [_in_order(rows, pending.pop(0), part[rows.ring.rank]) for part in parts]  # each goes once it was copied


def _in_order(rows: RowShare, pending: Pending, heads: Span) -> Tensor:
    """[B, S padded, n, ...] of the tokens of n heads that arrive, rank by rank."""
    by_rank = pending.wait()[0].unflatten(0, (rows.ring.size, heads[1] - heads[0]))
    return rows.layout.merge(by_rank.movedim(1, 3))


def _scatter_tokens(
    rows: RowShare, tensors: Sequence[Tensor], parts: Sequence[list[Span]], counts: Sequence[int]
) -> list[Tensor]:
    """The inverse: [B, S padded, n, ...] to [B, T, N, ...]; copies from several ranks are summed in rank order."""
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
    """Adds spans [n, ...] into [N, ...]; overlaps are summed."""
    if sum(stop - start for start, stop in part) == count:
        return x
    total = torch.zeros(count, *x.shape[1:], dtype=accumulate_dtype(x.dtype), device=x.device)
    for (lo, hi), piece in zip(part, x.split([stop - start for start, stop in part]), strict=True):
        total[lo:hi] += piece
    return total.to(x.dtype)
