"""The backward of ring attention: by a ring pass or by all-gather, with gradients in the inputs' dtype."""

from __future__ import annotations

from contextlib import closing
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..dtypes import accumulate_dtype
from ..kernels import Gradients, Kernel, Params, Place
from ..sharding.layout import Layout, chunks_of
from ..sharding.plan import SegmentTable
from ..traffic import Sums, Traffic, interruption_guard, ring_pass_groups, ring_pass_halves, seen_by_heads
from .call import Call, Results


def gradients(
    call: Call, results: Results, traffic: Traffic, kernel: Kernel, extra: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv and dsinks; adds gradients of captured tensors to ``extra``, as in `Gradients`."""
    results = results._replace(dout=results.dout.contiguous())
    job = _Backward(call, results, traffic, kernel, {} if extra is None else extra)
    if call.plan.tables.exchange is not None or (call.options.backward == "gather" and traffic.ring.size > 1):
        dq, dk, dv = job.by_gather()
    else:
        dq, dk, dv = job.by_ring()
    return dq, dk, dv, _sinks_gradient(job.delta, results.lse, call.params.sinks)


def _sinks_gradient(delta: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Computes this rank's share of the sinks' gradient [H].

    A sink has probability exp(sink - lse) and the value 0, so its gradient is -sum(probability * delta).
    """
    if sinks is None:
        return lse.new_empty(0)
    share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    share = share.masked_fill(lse == -torch.inf, 0)  # a query without keys whose sink is -inf has no weights to share
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


def _round_into(out: Tensor, gradient: Tensor) -> None:
    """Writes a gradient into a buffer of the input's dtype: the only rounding."""
    out.copy_(gradient)


class _Backward:
    def __init__(
        self, call: Call, results: Results, traffic: Traffic, kernel: Kernel, extra: dict[str, Tensor]
    ) -> None:
        self.call, self.results, self.traffic, self.kernel, self.extra = call, results, traffic, kernel, extra
        self.q, self.k, self.v, self.params, self.tables = call.q, call.k, call.v, call.params, call.plan.tables
        self.of_q = self._place("q", self.q, self.tables.queries)

    @property
    def _chunk(self) -> int:
        """Tokens of a kernel's call."""
        ring = self.traffic.ring
        return self.k.shape[1] // len(chunks_of(ring.size, self.tables.owners)[ring.rank])

    def by_ring(self) -> tuple[Tensor, Tensor, Tensor]:
        """Computes dq, dk and dv by ring passes, one group of heads after another."""
        ring = self.traffic.ring
        groups = [slice(0, self.k.shape[2])]
        if ring.size > 1:
            itemsize = accumulate_dtype(self.q.dtype).itemsize
            groups = ring_pass_groups(self.q, self.k, self.v, self._chunk, itemsize)
        if len(groups) > 1:
            self._make_delta()
        # Allocated before the ring passes: head halves write here from two streams.
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (self.k, self.v))
        guard = interruption_guard(ring)
        if len(groups) == 1:
            with guard.ring_pass(0, 1):
                return self._ring_pass(dk, dv), dk, dv
        dq = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        for number, heads in enumerate(groups):
            with guard.ring_pass(number, len(groups)):
                part = self._of_heads(heads)
                part._ring_pass(dk[:, :, heads], dv[:, :, heads], dq[:, :, self.call.query_heads(heads)])
                del part  # before the next one's accumulators are made
        return dq, dk, dv

    def _ring_pass(self, dk: Tensor, dv: Tensor, dq: Tensor | None = None) -> Tensor:
        """Passes keys, values and gradient accumulators around the ring; writes dk and dv in place.

        Returns dq, written into the given tensor if there is one.
        """
        segments, rank = self.tables.segments, self.traffic.ring.rank
        halves = ring_pass_halves(self.q, self.k, self.traffic, self._chunk)

        def new(source: int, heads: slice) -> Sums:
            return self._new_sums(self.k[:, :, heads], self.v[:, :, heads], segments[source])

        # A score_mod's gradients are shared by all heads: two streams would add to them at once.
        two_streams = self.kernel.two_streams and self.params.score_mod is None
        with closing(self.traffic.ring_pass(self.k, self.v, halves, new, two_streams)) as ring_pass:
            self._prepare()
            queries = {heads.start: self._queries(heads) for heads in halves}
            for step in ring_pass:
                keys = step.k, step.v, segments[step.source]
                with step.at:
                    self._add(queries[step.heads.start], *keys, self.tables.backward[step.source], step.sums)
                    if step.source == rank:
                        self._finish(*keys, step.sums, (dk[:, :, step.heads], dv[:, :, step.heads]))
                del step, keys  # before the next ones arrive; the last accumulators before dq is made
        return self._finished_dq(dq)

    def _of_heads(self, heads: slice) -> _Backward:
        """The same backward for some key heads and the query heads that read them."""
        mine = self.call.query_heads(heads)
        results = self.results.of_heads(mine)
        part = _Backward(self.call.of_heads(heads), results, self.traffic, self.kernel, self.extra)
        part.delta = self.delta[:, mine]
        return part

    def by_gather(self) -> tuple[Tensor, Tensor, Tensor]:
        """Computes dq, dk and dv: gathers keys and values as the forward does, and reduce-scatters dk and dv.

        Each group of heads has accumulators of its own, so their memory is that of a group.
        """
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (self.q, self.k, self.v))
        gathered = seen_by_heads(self.traffic, self.tables, self.q, self.k, self.v, self.call.options.heads_per_gather)
        self._make_delta()
        wide = accumulate_dtype(self.q.dtype)
        for heads, k, v, _ in gathered:
            part, keys = self._of_heads(heads), (k, v, self.tables.keys)
            part._prepare()
            sums = list(part._new_sums(*keys))
            part._add(part._queries(slice(0, k.shape[2])), *keys, self.tables.forward, (sums[0], sums[1]))
            part._finished_dq(dq[:, :, self.call.query_heads(heads)])
            places = self._place("k", k, self.tables.keys), self._place("v", v, self.tables.keys)
            del part, keys, k, v  # before gradients leave, and the next ones arrive
            for gradient, place in zip((dk, dv), places, strict=True):
                # Still unrounded, but out of the kernel's own memory order, which cannot be split by rank.
                _round_into(gradient[:, :, heads], self._reduced(self.kernel.finish(sums.pop(0), wide, place)))
        return dq, dk, dv

    def _prepare(self) -> None:
        """Computes what needs no remote keys, while the first of them are in transfer."""
        self._make_delta()
        self.dq = self.kernel.new_gradient(self.q, self.of_q)

    def _make_delta(self) -> None:
        if not hasattr(self, "delta"):
            self.delta = self.kernel.delta(self.results.dout, self.results.out)

    def _finished_dq(self, out: Tensor | None = None) -> Tensor:
        return self.kernel.finish(self.dq, self.q.dtype, self.of_q, out)

    def _queries(self, heads: slice) -> _Queries:
        """The queries that read these key heads."""
        mine = self.call.query_heads(heads)
        return _Queries(
            self.q[:, :, mine], self.results.of_heads(mine), self.delta[:, mine], self.kernel.of_heads(self.dq, mine),
            self.params.of_heads(mine),
        )  # fmt: skip

    def _new_sums(self, k: Tensor, v: Tensor, segments: SegmentTable) -> Sums:
        new = self.kernel.new_gradient
        return new(k, self._place("k", k, segments)), new(v, self._place("v", v, segments))

    def _add(self, of: _Queries, k: Tensor, v: Tensor, segments: SegmentTable, tiles: Tensor, sums: Sums) -> None:
        """Adds the gradients of these tiles to ``sums`` and to the queries' dq; ``segments``: of the keys."""
        of_q, of_k, of_v = (
            self._place("q", of.q, self.tables.queries), self._place("k", k, segments), self._place("v", v, segments),
        )  # fmt: skip
        into = Gradients(of.dq, *sums, (of_q, of_k, of_v), self.extra)
        out, lse, dout = of.results
        self.kernel.backward(dout, of.q, k, v, lse, of.delta, tiles, of.params, into, out)

    def _finish(self, k: Tensor, v: Tensor, segments: SegmentTable, sums: Sums, into: Sums) -> None:
        """Rounds the gradients of this rank's keys into the given tensors."""
        places = self._place("k", k, segments), self._place("v", v, segments)
        for gradient, place, out in zip(sums, places, into, strict=True):
            self.kernel.finish(gradient, out.dtype, place, out)

    def _reduced(self, gradient: Tensor) -> Tensor:
        """Reduce-scatters the gradient of the keys seen to [B, T, heads, ...] of this rank's own tokens."""
        ring, tokens = self.traffic.ring, self.k.shape[1]
        if self.tables.exchange is not None:
            return self.tables.exchange.give_back(ring, gradient, tokens)
        layout = Layout(tokens * ring.size, ring.size, ring.rank, self.tables.owners)
        return ring.reduce_scatter(layout.split(gradient))

    def _place(self, of: Literal["q", "k", "v"], x: Tensor, segments: SegmentTable) -> Place:
        """The `Place` of the gradient of ``x``."""
        widths = self.q.shape[3], self.v.shape[3]
        scale = 1.0 if of == "v" else self.params.scale
        return Place(of, tuple(x.shape), widths, *segments, scale)


class _Queries(NamedTuple):
    """This rank's queries for some key heads; each step adds to ``dq``."""

    q: Tensor
    results: Results
    delta: Tensor
    dq: Tensor
    params: Params
