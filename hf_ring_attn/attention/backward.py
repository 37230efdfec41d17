"""The gradients of one attention in a ring, by either road, in the dtype of its inputs."""

from __future__ import annotations

from contextlib import closing
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..kernels import Gradients, Kernel, Params, Place, accumulate_dtype
from ..sharding.layout import Layout, chunks_of
from ..sharding.plan import Segments, Tables
from ..traffic import Sums, Traffic, head_halves, interruption_guard, ring_pass_groups, seen_by_heads


def gradients(
    traffic: Traffic, kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    tables: Tables, params: Params, backward: str, heads_per_gather: int, extra: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and dsinks; the gradients of what a score_mod captures are added to ``extra``, as in `Gradients`."""
    job = _Backward(traffic, kernel, tables, dout.contiguous(), q, k, v, out, lse, params, extra)
    if tables.exchange is not None or (backward == "gather" and traffic.ring.size > 1):
        dq, dk, dv = job.by_gather(heads_per_gather)
    else:
        dq, dk, dv = job.by_ring()
    return dq, dk, dv, _sinks_gradient(job.delta, lse, params.sinks)


def _sinks_gradient(delta: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """This rank's share of the sinks' gradient [H].

    A sink has probability exp(sink - lse) and the value 0, so its gradient is -sum(probability * delta).
    """
    if sinks is None:
        return lse.new_empty(0)
    share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    share = share.masked_fill(lse == -torch.inf, 0)  # a query without keys whose sink is -inf has no weights to share
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


def _rounded(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """In memory order, as the op's fake implementation has it."""
    return gradient.to(dtype, memory_format=torch.contiguous_format).contiguous()


class _Backward:
    def __init__(
        self, traffic: Traffic, kernel: Kernel, tables: Tables, dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
        out: Tensor, lse: Tensor, params: Params, extra: dict[str, Tensor],
    ) -> None:  # fmt: skip
        self.traffic, self.kernel, self.tables, self.params, self.extra = traffic, kernel, tables, params, extra
        self.dout, self.q, self.k, self.v, self.out, self.lse = dout, q, k, v, out, lse
        self.of_q = self._place("q", q, tables.queries)

    def by_ring(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv, a group of heads after the other."""
        ring, owners = self.traffic.ring, self.tables.owners
        groups = [slice(0, self.k.shape[2])]
        if ring.size > 1:
            chunk = self.k.shape[1] // len(chunks_of(ring.size, owners)[ring.rank])
            groups = ring_pass_groups(self.q, self.k, self.v, chunk, accumulate_dtype(self.q.dtype).itemsize)
        if len(groups) > 1:
            self._make_delta()
        # Made before the walks: lanes write here from streams of their own.
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (self.k, self.v))
        halfway, dq = interruption_guard(ring), []
        for number, heads in enumerate(groups):
            with halfway.walk(number, len(groups)):
                part = self._of_heads(heads) if len(groups) > 1 else self
                dq.append(part._walk(dk[:, :, heads], dv[:, :, heads]))
                del part  # before the next one's accumulators are made
        return dq[0] if len(dq) == 1 else torch.cat(dq, 2), dk, dv

    def _walk(self, dk: Tensor, dv: Tensor) -> Tensor:
        """Keys and values visit every rank, and the sums of their gradients behind them, home to dk and dv; dq, which
        stays home."""
        segments, rank = self.tables.segments, self.traffic.ring.rank
        lanes = head_halves(self.k.shape[2], self.traffic.ring.size)

        def new(source: int, heads: slice) -> Sums:
            return self._new_sums(self.k[:, :, heads], self.v[:, :, heads], segments[source])

        # A score_mod's gradients are of all heads: two lanes would add to them at once.
        two_streams = self.kernel.two_streams and self.params.score_mod is None
        with closing(self.traffic.ring_pass(self.k, self.v, lanes, new, two_streams)) as ring_pass:
            self._prepare()
            lane = {heads.start: self._queries(heads) for heads in lanes}
            for hop in ring_pass:
                keys = hop.k, hop.v, segments[hop.source]
                with hop.at:
                    self._add(lane[hop.heads.start], *keys, self.tables.backward[hop.source], hop.sums)
                    if hop.source == rank:
                        self._finished(*keys, hop.sums, self.k.dtype, (dk[:, :, hop.heads], dv[:, :, hop.heads]))
        del hop, keys  # the last sums go before dq is made
        return self._finished_dq()

    def _of_heads(self, heads: slice) -> _Backward:
        """Of these key heads and the query heads that read them."""
        mine = self._read_by(heads)
        part = _Backward(
            self.traffic, self.kernel, self.tables, self.dout[:, :, mine], self.q[:, :, mine], self.k[:, :, heads],
            self.v[:, :, heads], self.out[:, :, mine], self.lse[:, mine], self.params.of_heads(mine), self.extra,
        )  # fmt: skip
        part.delta = self.delta[:, mine]
        return part

    def by_gather(self, heads_per_gather: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values come again, a few heads at a time, as in the forward; their gradients go home and are summed
        there."""
        parts = []
        tables = self.tables
        gathered = seen_by_heads(
            self.traffic, tables.exchange, tables.owners, self.q, self.k, self.v, heads_per_gather,
            most=tables.most,
        )  # fmt: skip
        self._prepare()
        wide = accumulate_dtype(self.q.dtype)
        for heads, k, v, _ in gathered:
            keys = k, v, self.tables.keys
            sums = self._new_sums(*keys)
            self._add(self._queries(heads), *keys, self.tables.forward, sums)
            # Not rounded yet, and no longer in a kernel's own order, which cannot be cut into ranks' shares.
            dk, dv = (self._home(x) for x in self._finished(*keys, sums, wide))
            parts.append((_rounded(dk, k.dtype), _rounded(dv, v.dtype)))
        dk, dv = (column[0] if len(column) == 1 else torch.cat(column, 2) for column in zip(*parts, strict=True))
        return self._finished_dq(), dk, dv

    def _prepare(self) -> None:
        """What needs no keys of others, while the first of them are on their way."""
        self._make_delta()
        self.dq = self.kernel.new_gradient(self.q, self.of_q)

    def _make_delta(self) -> None:
        if not hasattr(self, "delta"):
            self.delta = self.kernel.delta(self.dout, self.out)

    def _finished_dq(self) -> Tensor:
        return self.kernel.finish(self.dq, self.q.dtype, self.of_q)

    def _queries(self, heads: slice) -> _Queries:
        """The queries that read these key heads."""
        mine = self._read_by(heads)
        return _Queries(
            self.q[:, :, mine], self.dout[:, :, mine], self.out[:, :, mine], self.lse[:, mine], self.delta[:, mine],
            self.kernel.of_heads(self.dq, mine), self.params.of_heads(mine),
        )  # fmt: skip

    def _read_by(self, heads: slice) -> slice:
        """The query heads of these key heads."""
        per_key_head = self.q.shape[2] // self.k.shape[2]
        return slice(heads.start * per_key_head, heads.stop * per_key_head)

    def _new_sums(self, k: Tensor, v: Tensor, segments: Segments) -> Sums:
        new = self.kernel.new_gradient
        return new(k, self._place("k", k, segments)), new(v, self._place("v", v, segments))

    def _add(self, of: _Queries, k: Tensor, v: Tensor, segments: Segments, tiles: Tensor, sums: Sums) -> None:
        """Adds the gradients of these tiles to ``sums`` and to that of the queries; segments: those of the keys."""
        of_q, of_k, of_v = (
            self._place("q", of.q, self.tables.queries), self._place("k", k, segments), self._place("v", v, segments),
        )  # fmt: skip
        into = Gradients(of.dq, *sums, (of_q, of_k, of_v), self.extra)
        self.kernel.backward(of.dout, of.q, k, v, of.lse, of.delta, tiles, of.params, into, of.out)

    def _finished(
        self, k: Tensor, v: Tensor, segments: Segments, sums: Sums, dtype: torch.dtype,
        into: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Sums:  # fmt: skip
        finish = self.kernel.finish
        of_k, of_v = self._place("k", k, segments), self._place("v", v, segments)
        return finish(sums[0], dtype, of_k, into[0]), finish(sums[1], dtype, of_v, into[1])

    def _home(self, gradient: Tensor) -> Tensor:
        """[B, T, heads, ...] of this rank's own tokens, summed over ranks, from each rank's of the keys that it saw."""
        ring, tokens = self.traffic.ring, self.k.shape[1]
        if self.tables.exchange is not None:
            return self.tables.exchange.give_back(ring, gradient, tokens)
        layout = Layout(tokens * ring.size, ring.size, ring.rank, self.tables.owners)
        return ring.reduce_scatter(layout.split(gradient))

    def _place(self, of: Literal["q", "k", "v"], x: Tensor, segments: Segments) -> Place:
        """Where the gradient of ``x`` goes."""
        widths = self.q.shape[3], self.v.shape[3]
        scale = 1.0 if of == "v" else self.params.scale
        return Place(of, tuple(x.shape), widths, *segments, scale)


class _Queries(NamedTuple):
    """This rank's queries for some key heads; ``dq`` grows with every set of keys that they meet."""

    q: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    params: Params
