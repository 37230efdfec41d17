"""Simulates other packages' rings on one device: each step's partial result leaves its kernel in 16 bits.

Forward: a rank attends to one rank's keys at a time, and partial outs are merged by their lse. Backward: each step's
contribution to dq, dk and dv is rounded to the inputs' dtype. Two ways of summing:

- "rounded parts": in float32, with one more rounding at the end (ring-flash-attention's zigzag ring, torch's ring);
- "16-bit sums": in the inputs' dtype, so that every sum is rounded too (TransformerEngine's p2p, as released).

The layout is the zigzag, as theirs; each kernel call covers the same tiles as one of theirs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..dtypes import accumulate_dtype
from ..kernels import Gradients, Kernel, Params
from ..sharding.mask import CAUSAL, UNBOUNDED, Mask
from .replay import Answer, places, ranks_of, replay_forward

Way = Literal["rounded parts", "16-bit sums"]
WAYS: tuple[Way, ...] = ("rounded parts", "16-bit sums")


def rounded(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, size: int, params: Params, way: Way,
    merged: bool = True,
) -> Answer:  # fmt: skip
    """Computes a causal row [B, S, ...] in such a ring of ``size``.

    Args:
        merged: False uses this package's forward, so that only gradients differ.
    """
    mask = Mask.of(CAUSAL, q.shape[0], q.shape[1])
    if merged:
        out, lse = merged_forward(kernel, q, k, v, size, params, way)
    else:
        out, lse = replay_forward(kernel, q, k, v, mask, size, params)
    return Answer(out, lse, *rounded_backward(kernel, q, k, v, out, lse, dout, size, params, way))


def merged_forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, size: int, params: Params, way: Way
) -> tuple[Tensor, Tensor]:
    """out in q's dtype and lse of a causal row: each rank's own keys first, then those of the ranks before it."""
    batch, length, heads, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3])
    lse = q.new_empty(batch, heads, length, dtype=accumulate_dtype(q.dtype))
    mask = Mask.of(CAUSAL, batch, length)
    at = [rank.held.to(q.device) for rank in ranks_of(length, size, mask)]
    for rank, here in enumerate(at):
        mine, parts = q[:, here], []
        for step in range(size):
            source = (rank - step) % size
            kk, vv = k[:, at[source]], v[:, at[source]]
            tiles = _hop(batch, mine.shape[1], rank, source)
            parts.append(kernel.forward(mine, kk, vv, tiles, params))
        merge = _merged_wide if way == "rounded parts" else _merged_narrow
        whole, lse[:, :, here] = merge(parts)
        out[:, here] = whole.to(out.dtype)
    return out, lse


def _hop(batch: int, tokens: int, rank: int, source: int) -> Tensor:
    """The tiles of one step of those rings: causal on a rank's own keys; else all queries with the first half of the
    keys, or the second half of the queries with all keys."""
    half, free = tokens // 2, (-UNBOUNDED, UNBOUNDED)
    if source == rank:
        tile = (0, tokens, 0, 0, tokens, 0, 0, UNBOUNDED)
    elif source < rank:
        tile = (0, tokens, 0, 0, half, 0, *free)
    else:
        tile = (half, half, 0, 0, tokens, 0, *free)
    return torch.tensor([(row, *tile) for row in range(batch)])


def _merged_wide(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges parts one by one in float32, as ring-flash-attention's update_out_and_lse."""
    (first, lse), *others = parts
    out = first.to(lse.dtype)
    for part, log_sum in others:
        share = torch.sigmoid(log_sum - lse).transpose(1, 2)[..., None]
        out = out - share * (out - part)
        lse = lse - torch.nn.functional.logsigmoid(lse - log_sum)
    return out, lse


def _merged_narrow(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges all lse first, then adds weighted outs in 16 bits, as TransformerEngine's out correction."""
    lse = torch.stack([log_sum for _, log_sum in parts]).logsumexp(0)
    out = torch.zeros_like(parts[0][0])
    for part, log_sum in parts:
        out.add_(part * torch.exp(log_sum - lse).transpose(1, 2)[..., None])
    return out, lse


def rounded_backward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, size: int,
    params: Params, way: Way,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of a causal row, from a forward's results."""
    length = q.shape[1]
    mask = Mask.of(CAUSAL, q.shape[0], length)
    ranks = ranks_of(length, size, mask)
    at = [rank.held.to(q.device) for rank in ranks]
    keys = [(k[:, here].contiguous(), v[:, here].contiguous()) for here in at]
    dtype = accumulate_dtype(q.dtype) if way == "rounded parts" else q.dtype
    totals = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v)]
    parts = []
    for here in at:
        d, outs = dout[:, here], out[:, here]
        parts.append((d, q[:, here], outs, lse[:, :, here], kernel.delta(d, outs)))
    new = kernel.new_gradient
    for step in range(size):  # each rank's own keys first, and so each key's own rank
        for r, (rank, (d, mine, outs, log_sum, delta)) in enumerate(zip(ranks, parts, strict=True)):
            source = (r - step) % size
            kk, vv = keys[source]
            home = places(mine, kk, vv, rank.tables.queries, rank.tables.segments[source], params.scale)
            into = Gradients(new(mine, home[0]), new(kk, home[1]), new(vv, home[2]), home)
            kernel.backward(d, mine, kk, vv, log_sum, delta, rank.tables.backward[source], params, into, outs)
            found = zip((into.dq, into.dk, into.dv), (at[r], at[source], at[source]), home, strict=True)
            for total, (sums, index, place) in zip(totals, found, strict=True):
                total[:, index] += kernel.finish(sums, q.dtype, place)
    dq, dk, dv = (total.to(q.dtype) for total in totals)
    return dq, dk, dv
