"""Simulates a ring on one device, rank after rank, with the real one's kernel calls and summation order."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..comm.ring import Ring
from ..dtypes import accumulate_dtype
from ..kernels import Gradients, Kernel, Params, Place
from ..sharding.layout import Layout
from ..sharding.mask import Mask
from ..sharding.plan import Plan, SegmentTable, Tables, seen_keys
from ..traffic import head_halves


class Answer(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Rank(NamedTuple):
    """A simulated rank: the positions of its tokens, its tables, its segments."""

    layout: Layout
    held: Tensor
    tables: Tables
    seen: Tensor
    """Indices of the keys of its forward: all, or in a sparse plan those that it sees."""

    @classmethod
    def of(cls, length: int, size: int, rank: int, mask: Mask, sparse: bool = False) -> Rank:
        layout = Layout(length, size, rank)
        assert layout.padded == length, "a replay pads nothing"
        plan = Plan.of(Ring.simulated(size, rank), layout, mask, sparse_share=float(sparse))
        runs = seen_keys(mask, layout, rank) if sparse and size > 1 else layout.whole()
        seen = [torch.arange(run.position, run.position + run.length) for run in runs]
        seen.append(torch.empty(0, dtype=torch.int64))
        return cls(layout, layout.positions(), plan.tables, torch.cat(seen))


Transfer = Literal["ring", "gather", "sparse"]


@lru_cache(maxsize=64)
def ranks_of(length: int, size: int, mask: Mask, sparse: bool = False) -> tuple[Rank, ...]:
    """All ranks of a ring; cached, since every layer of a stack uses the same."""
    return tuple(Rank.of(length, size, rank, mask, sparse) for rank in range(size))


def places(
    q: Tensor, k: Tensor, v: Tensor, queries: SegmentTable, keys: SegmentTable, scale: float
) -> tuple[Place, Place, Place]:
    widths = q.shape[3], v.shape[3]
    return (
        Place("q", tuple(q.shape), widths, *queries, scale), Place("k", tuple(k.shape), widths, *keys, scale),
        Place("v", tuple(v.shape), widths, *keys, 1.0),
    )  # fmt: skip


def replay(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, size: int, params: Params,
    wide: torch.dtype | None = None, path: Transfer = "ring", extra: dict[str, Tensor] | None = None,
) -> Answer:  # fmt: skip
    """Computes whole rows [B, S, ...] in a ring of ``size``; gradients in ``wide`` (None: their inputs' dtype).

    ``path``: backward by a ring pass or by gather, or "sparse": each rank has only the keys that it sees.
    ``extra``: receives the gradients of a score_mod's captured tensors, summed over ranks.
    """
    out, lse = replay_forward(kernel, q, k, v, mask, size, params, path)
    parts = replay_backward(kernel, q, k, v, out, lse, dout, mask, size, params, wide, path, extra)
    return Answer(out, lse, *parts)


def replay_forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Mask, size: int, params: Params, path: Transfer = "ring"
) -> tuple[Tensor, Tensor]:
    """out [B, S, H, Dv] and lse [B, H, S]: each rank's queries against all keys that they see, in one softmax."""
    batch, length, heads, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3])
    lse = q.new_empty(batch, heads, length, dtype=accumulate_dtype(q.dtype))
    for rank in ranks_of(length, size, mask, path == "sparse"):
        here, these = rank.held.to(q.device), rank.seen.to(q.device)
        mine = q[:, here] if size > 1 else q
        kk, vv = (k[:, these], v[:, these]) if path == "sparse" else (k, v)
        out[:, here], lse[:, :, here] = kernel.forward(mine, kk, vv, rank.tables.forward, params)
    return out, lse


def replay_backward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, mask: Mask, size: int,
    params: Params, wide: torch.dtype | None = None, path: Transfer = "ring", extra: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of whole rows, from a forward's results."""
    extra = {} if extra is None else extra
    length = q.shape[1]
    ranks = ranks_of(length, size, mask, path == "sparse")
    seen = [rank.seen.to(q.device) for rank in ranks]
    at = [rank.held.to(q.device) for rank in ranks]
    dq, dk, dv = (torch.empty(x.shape, dtype=wide or x.dtype, device=x.device) for x in (q, k, v))
    parts = []
    for here in at:
        mine = q[:, here] if size > 1 else q
        parts.append((dout[:, here], mine, lse[:, :, here], kernel.delta(dout[:, here], out[:, here])))

    if path != "ring":
        sums = torch.zeros(k.shape, device=k.device), torch.zeros(v.shape, device=v.device)
        for rank, here, these, (d, mine, log_sum, delta) in zip(ranks, at, seen, parts, strict=True):
            kk, vv = k[:, these], v[:, these]
            home = places(mine, kk, vv, rank.tables.queries, rank.tables.keys, params.scale)
            new = kernel.new_gradient
            into = Gradients(new(mine, home[0]), new(kk, home[1]), new(vv, home[2]), home, extra)
            kernel.backward(d, mine, kk, vv, log_sum, delta, rank.tables.forward, params, into, out[:, here])
            dq[:, here] = kernel.finish(into.dq, wide or q.dtype, home[0])
            for total, x, p in zip(sums, (into.dk, into.dv), home[1:], strict=True):
                total[:, these] += kernel.finish(x, torch.float32, p)
        return dq, sums[0].to(dk.dtype), sums[1].to(dv.dtype)

    of_q = [
        kernel.new_gradient(mine, places(mine, k, v, rank.tables.queries, rank.tables.segments[0], params.scale)[0])
        for rank, (_, mine, _, _) in zip(ranks, parts, strict=True)
    ]
    for half in head_halves(k.shape[2], size):
        of_half = slice(half.start * (q.shape[2] // k.shape[2]), half.stop * (q.shape[2] // k.shape[2]))
        keys = [(k[:, here][:, :, half], v[:, here][:, :, half]) for here in at]
        travelling: list[tuple[Tensor, Tensor] | None] = [None] * size
        for step in range(size):  # each rank's own keys last
            for r, rank in enumerate(ranks):
                source = (r - 1 - step) % size
                d, mine, log_sum, delta = parts[r]
                d, mine, mine_out = d[:, :, of_half], mine[:, :, of_half], out[:, at[r]][:, :, of_half]
                kk, vv = keys[source]
                home = places(mine, kk, vv, rank.tables.queries, rank.tables.segments[source], params.scale)
                sums = travelling[source] or (kernel.new_gradient(kk, home[1]), kernel.new_gradient(vv, home[2]))
                into = Gradients(kernel.of_heads(of_q[r], of_half), *sums, home, extra)
                kernel.backward(
                    d, mine, kk, vv, log_sum[:, of_half], delta[:, of_half], rank.tables.backward[source],
                    params.of_heads(of_half), into, mine_out,
                )  # fmt: skip
                travelling[source] = sums
        shapes = {tuple(x.shape for x in pair) for pair in travelling if pair is not None}
        assert len(shapes) == 1, "accumulators that are sent on must have one size"
        for r, rank in enumerate(ranks):
            home = places(parts[r][1], *keys[r], rank.tables.queries, rank.tables.segments[r], params.scale)
            pair = travelling[r]
            assert pair is not None
            for whole, x, p in zip((dk, dv), pair, home[1:], strict=True):
                whole[:, at[r], half] = kernel.finish(x, whole.dtype, p)
    for r, rank in enumerate(ranks):
        home = places(parts[r][1], k, v, rank.tables.queries, rank.tables.segments[r], params.scale)
        dq[:, at[r]] = kernel.finish(of_q[r], dq.dtype, home[0])
    return dq, dk, dv
