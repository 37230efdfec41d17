"""The gradients of one attention in a ring, by either road, in the dtype of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import Gradients, Kernel, Params, Place, accumulate_dtype
from .layout import Layout
from .tables import Tables
from .traffic import Hop, Sums, Traffic, lanes_of, seen_by_heads


def gradients(
    traffic: Traffic, kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    tables: Tables, params: Params, backward: str, heads_per_gather: int, extra: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and dsinks; the gradients of what a score_mod captures are added to ``extra``, as in `Gradients`."""
    delta = kernel.delta(dout, out)
    dsinks = _sinks_gradient(delta, lse, params.sinks)
    job = _Backward(traffic, kernel, tables, dout.contiguous(), q, k, v, out, lse, delta, params, extra)
    by_gather = tables.exchange is not None or (backward == "gather" and traffic.ring.size > 1)
    parts = job.by_gather(heads_per_gather) if by_gather else job.by_ring()
    dq, dk, dv = (column[0] if len(column) == 1 else torch.cat(column, 2) for column in zip(*parts, strict=True))
    return dq, dk, dv, dsinks


def _sinks_gradient(delta: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """This rank's share of the sinks' gradient [H].

    A sink has probability exp(sink - lse) and the value 0, so its gradient is -sum(probability * delta).
    """
    if sinks is None:
        return lse.new_empty(0)
    share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


def _rounded(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.to(dtype)


@dataclass(eq=False)
class _Backward:
    traffic: Traffic
    kernel: Kernel
    tables: Tables
    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor
    params: Params
    extra: dict[str, Tensor]

    def by_ring(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Keys and values visit every rank, and the sums of their gradients behind them; dq stays home."""
        ring, segments = self.traffic.ring, self.tables.segments
        lanes = {heads.start: self._queries(heads) for heads in lanes_of(self.k.shape[2], ring.size)}

        def new(source: int, heads: slice) -> Sums:
            return lanes[heads.start].new_sums(self.k[:, :, heads], self.v[:, :, heads], segments[source])

        def finished(hop: Hop) -> tuple[Tensor, Tensor, Tensor]:
            return lanes[hop.heads.start].finished(hop.k, hop.v, hop.sums, segments[hop.source], rounded=True)

        home = []
        for hop in self.traffic.hops(self.k, self.v, [lane.heads for lane in lanes.values()], new):
            lane = lanes[hop.heads.start]
            lane.add(hop.k, hop.v, hop.sums, segments[hop.source], self.tables.backward[hop.source])
            if hop.source == ring.rank:
                home.append(finished(hop))
        return home

    def by_gather(self, heads_per_gather: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Keys and values come again, a few heads at a time, as in the forward; their gradients go home and are summed
        there."""
        parts = []
        for heads, k, v in seen_by_heads(self.traffic, self.tables.exchange, self.k, self.v, heads_per_gather):
            queries, keys = self._queries(heads), self.tables.keys
            sums = queries.new_sums(k, v, keys)
            queries.add(k, v, sums, keys, self.tables.forward)
            # Not rounded yet, and no longer in a kernel's own order, which cannot be cut into ranks' shares.
            dq, dk, dv = queries.finished(k, v, sums, keys, rounded=False)
            parts.append((dq, _rounded(self._home(dk), k.dtype), _rounded(self._home(dv), v.dtype)))
        return parts

    def _queries(self, heads: slice) -> _Queries:
        """The queries that read these key heads."""
        per_key_head = self.q.shape[2] // self.k.shape[2]
        mine = slice(heads.start * per_key_head, heads.stop * per_key_head)
        return _Queries(
            heads, self.kernel, self.tables.queries, self.q[:, :, mine], self.dout[:, :, mine], self.out[:, :, mine],
            self.lse[:, mine], self.delta[:, mine], self.params.of_heads(mine), self.extra,
        )  # fmt: skip

    def _home(self, gradient: Tensor) -> Tensor:
        """[B, T, heads, ...] of this rank's own tokens, summed over ranks, from each rank's of the keys that it saw."""
        ring, tokens = self.traffic.ring, self.k.shape[1]
        if self.tables.exchange is not None:
            return self.tables.exchange.give_back(ring, gradient, tokens)
        return ring.reduce_scatter(Layout(tokens * ring.size, ring.size, ring.rank).split(gradient))


@dataclass(eq=False)
class _Queries:
    """This rank's queries for some key heads, and the sum of their gradient, which grows with every set of keys."""

    heads: slice
    kernel: Kernel
    segments: Tensor
    q: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor
    params: Params
    extra: dict[str, Tensor]
    dq: Tensor | None = None

    def new_sums(self, k: Tensor, v: Tensor, segments: Tensor) -> Sums:
        _, of_k, of_v = self._places(k, v, segments)
        return self.kernel.new_gradient(k, of_k), self.kernel.new_gradient(v, of_v)

    def add(self, k: Tensor, v: Tensor, sums: Sums, segments: Tensor, tiles: Tensor) -> None:
        """Adds the gradients of these tiles to ``sums`` and to that of the queries; segments: those of the keys."""
        places = self._places(k, v, segments)
        if self.dq is None:
            self.dq = self.kernel.new_gradient(self.q, places[0])
        into = Gradients(self.dq, *sums, places, self.extra)
        self.kernel.backward(self.dout, self.q, k, v, self.lse, self.delta, tiles, self.params, into, self.out)

    def finished(
        self, k: Tensor, v: Tensor, sums: Sums, segments: Tensor, rounded: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv; the latter two rounded to the dtype of the inputs, or as wide as they were summed."""
        of_q, of_k, of_v = self._places(k, v, segments)
        finish, dtype = self.kernel.finish, self.q.dtype
        wide = dtype if rounded else accumulate_dtype(dtype)
        assert self.dq is not None, "nothing was added"
        return finish(self.dq, dtype, of_q), finish(sums[0], wide, of_k), finish(sums[1], wide, of_v)

    def _places(self, k: Tensor, v: Tensor, segments: Tensor) -> tuple[Place, Place, Place]:
        """Where the gradients go, given the segments of the keys as `Tables` has them."""
        of_q, of_k = ((table[:, :3], bool(table[:, 3].any())) for table in (self.segments, segments))
        widths, scale = (self.q.shape[3], v.shape[3]), self.params.scale
        return (
            Place("q", tuple(self.q.shape), widths, *of_q, scale), Place("k", tuple(k.shape), widths, *of_k, scale),
            Place("v", tuple(v.shape), widths, *of_k, 1.0),
        )  # fmt: skip
