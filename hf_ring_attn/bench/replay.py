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
    ranks = ranks_of(q.shape[1], size, mask, path == "sparse")
    at = [rank.held.to(q.device) for rank in ranks]
    parts = []
    for here in at:
        mine, (outs, d) = q[:, here] if size > 1 else q, (out[:, here], dout[:, here])
        parts.append(Part(mine, outs, lse[:, :, here], d, kernel.delta(d, outs)))
    into = tuple(torch.empty(x.shape, dtype=wide or x.dtype, device=x.device) for x in (q, k, v))
    replayed = _Backward(kernel, k, v, ranks, at, parts, params, {} if extra is None else extra, *into)
    if path == "ring":
        replayed.by_ring()
    else:
        replayed.by_gather()
    return replayed.dq, replayed.dk, replayed.dv


class Part(NamedTuple):
    """A rank's queries, the results of their forward, and what the backward of these begins with."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    delta: Tensor

    def of_heads(self, heads: slice) -> Part:
        """The same for some query heads."""
        q, out, dout = (x[:, :, heads] for x in (self.q, self.out, self.dout))
        return Part(q, out, self.lse[:, heads], dout, self.delta[:, heads])


class _Backward(NamedTuple):
    """The backward of all ranks, into dq, dk and dv. ``at``: the places of each rank's queries, ``parts``: these."""

    kernel: Kernel
    k: Tensor
    v: Tensor
    ranks: tuple[Rank, ...]
    at: list[Tensor]
    parts: list[Part]
    params: Params
    extra: dict[str, Tensor]
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def by_gather(self) -> None:
        """Each rank has all keys that it sees; sums of their gradients are reduce-scattered."""
        k, v, new = self.k, self.v, self.kernel.new_gradient
        sums = torch.zeros(k.shape, device=k.device), torch.zeros(v.shape, device=v.device)
        for rank, here, part in zip(self.ranks, self.at, self.parts, strict=True):
            these = rank.seen.to(k.device)
            kk, vv = k[:, these], v[:, these]
            home = places(part.q, kk, vv, rank.tables.queries, rank.tables.keys, self.params.scale)
            into = Gradients(new(part.q, home[0]), new(kk, home[1]), new(vv, home[2]), home, self.extra)
            self._add(part, kk, vv, rank.tables.forward, self.params, into)
            self.dq[:, here] = self.kernel.finish(into.dq, self.dq.dtype, home[0])
            for total, x, place in zip(sums, (into.dk, into.dv), home[1:], strict=True):
                total[:, these] += self.kernel.finish(x, torch.float32, place)
        self.dk.copy_(sums[0])
        self.dv.copy_(sums[1])

    def by_ring(self) -> None:
        """Keys, and sums of their gradients, pass from rank to rank: one half of the heads after the other."""
        of_q = [
            self.kernel.new_gradient(part.q, self._home(number, number, part.q, self.k, self.v)[0])
            for number, part in enumerate(self.parts)
        ]
        for half in head_halves(self.k.shape[2], len(self.ranks)):
            self._pass_half(half, of_q)
        for number, (here, part) in enumerate(zip(self.at, self.parts, strict=True)):
            home = self._home(number, number, part.q, self.k, self.v)
            self.dq[:, here] = self.kernel.finish(of_q[number], self.dq.dtype, home[0])

    def _pass_half(self, half: slice, of_q: list[Tensor]) -> None:
        """Passes some key heads around the ring; adds to the queries' sums ``of_q`` and writes dk and dv."""
        size, group = len(self.ranks), self.parts[0].q.shape[2] // self.k.shape[2]
        queries = slice(half.start * group, half.stop * group)
        keys = [(self.k[:, here][:, :, half], self.v[:, here][:, :, half]) for here in self.at]
        travelling: list[tuple[Tensor, Tensor] | None] = [None] * size
        for step in range(size):  # each rank's own keys last
            for number, rank in enumerate(self.ranks):
                source, part = (number - 1 - step) % size, self.parts[number].of_heads(queries)
                kk, vv = keys[source]
                home = self._home(number, source, part.q, kk, vv)
                sums = travelling[source] or (
                    self.kernel.new_gradient(kk, home[1]), self.kernel.new_gradient(vv, home[2]),
                )  # fmt: skip
                into = Gradients(self.kernel.of_heads(of_q[number], queries), *sums, home, self.extra)
                self._add(part, kk, vv, rank.tables.backward[source], self.params.of_heads(queries), into)
                travelling[source] = sums
        shapes = {tuple(x.shape for x in pair) for pair in travelling if pair is not None}
        assert len(shapes) == 1, "accumulators that are sent on must have one size"
        for number, (here, pair) in enumerate(zip(self.at, travelling, strict=True)):
            assert pair is not None
            home = self._home(number, number, self.parts[number].q, *keys[number])
            for whole, x, place in zip((self.dk, self.dv), pair, home[1:], strict=True):
                whole[:, here, half] = self.kernel.finish(x, whole.dtype, place)

    def _home(self, number: int, source: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Place, Place, Place]:
        """The places of the gradients of a rank's queries and of another rank's keys."""
        tables = self.ranks[number].tables
        return places(q, k, v, tables.queries, tables.segments[source], self.params.scale)

    def _add(self, part: Part, k: Tensor, v: Tensor, tiles: Tensor, params: Params, into: Gradients) -> None:
        """Adds the gradients of some tiles."""
        self.kernel.backward(part.dout, part.q, k, v, part.lse, part.delta, tiles, params, into, part.out)
