"""Ring attention: gathered forward, ring backward, as torch.library ops, and the function for people.

Forward (the all-gather of Llama 3, Dubey et al. 2024, section 3.3.2): keys and values are gathered a few heads at a
time and every query meets all its keys in one softmax, so no partial softmax is ever merged. Backward (zigzag ring):
keys and values travel, their accumulators follow one hop behind in float32, dq stays home. There is no branch for a
kind of mask here: tiles say what meets what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .comm import Follower, Ring
from .kernels import KERNELS, Gradients, Kernel, Params, Place, accumulate_dtype
from .layout import Layout
from .mask import Mask, segments, tiles

KEY_BLOCK = 384
"""The gathered forward's tiles begin at a multiple of this in their document: a multiple of every kernel's block of
keys, so that a query under a window meets its keys in the same blocks at every ring size, and gets the same bits."""

BYTES_PER_GATHER = 256 * 2**20
"""Where the caller names no number of heads: gathered keys and values of one head group stay below this."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a mask and a layout mean for the ring, as a table that ops can take. Built once per batch and mask.

    One table, because a compiler makes a new graph for each tensor whose length is new, or is 0 or 1.

    Args:
        ring: the name of the ring.
        tiles: [N, 9], this rank's queries against the whole row, and then, in a ring of several, against the keys of
            rank 0, 1, ...; after these the segments of `segments_of`.
        stops: int64 on the CPU, where in ``tiles`` each of these ends.
        holes: as in `Request`.
    """

    ring: str
    tiles: Tensor
    stops: Tensor
    holes: bool = False

    @classmethod
    def of(cls, ring: Ring, layout: Layout, mask: Mask) -> Plan:
        queries = layout.runs()
        tables = [tiles(mask, queries, layout.whole(), KEY_BLOCK)]
        if ring.size > 1:
            tables += [tiles(mask, queries, layout.runs(source)) for source in range(ring.size)]
        tables += _segments(layout, mask)
        stops = torch.tensor([len(table) for table in tables]).cumsum(0)
        return cls(ring.name, torch.cat(tables), stops, mask.holes)


def _segments(layout: Layout, mask: Mask) -> list[Tensor]:
    """The segments of this rank's queries, of the whole row's keys and of every rank's keys, each [n, 9]: a `Place`'s
    three columns, whether they are shared, and zeros."""
    if mask.one_document:
        chunk, halves = layout.chunk, 1 if layout.world_size == 1 else 2
        local = torch.tensor([[0, half * chunk, chunk] for half in range(halves)])
        tables = [local, torch.tensor([[0, 0, layout.padded]]), *[local] * layout.world_size]
    else:
        held = [layout.runs(rank) for rank in range(layout.world_size)]
        tables = [
            segments(mask, layout.runs(), keys=False), segments(mask, layout.whole(), keys=True),
            *[segments(mask, runs, keys=True) for runs in held],
        ]  # fmt: skip
        # Accumulators that travel have one size, which depends on how many segments there are.
        most = max(len(table) for table in tables[2:])
        tables[2:] = [torch.nn.functional.pad(table, (0, 0, 0, most - len(table))) for table in tables[2:]]
    shared = int(mask.one_document)
    return [torch.nn.functional.pad(torch.nn.functional.pad(x, (0, 1), value=shared), (0, 5)) for x in tables]


def tables_of(table: Tensor, stops: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """A plan's tiles for the forward, and those for the backward by the rank whose keys they meet."""
    sections = table.tensor_split(stops[:-1])
    ranks = _ring_size(sections)
    forward, *backward = sections[: ranks + 1] if ranks > 1 else sections[:1]
    return forward, backward or [forward]


def segments_of(table: Tensor, stops: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """A plan's segments, [n, 9]: of this rank's queries, of the whole row's keys, of the keys of rank 0, 1, ..."""
    sections = table.tensor_split(stops[:-1])
    queries, whole, *keys = sections[-2 - _ring_size(sections) :]
    return queries, whole, keys


def _ring_size(sections: Sequence[Tensor]) -> int:
    """Of the ring whose plan has these sections: 1 + W + 2 + W of them, or 1 + 2 + 1 in a ring of one."""
    return 1 if len(sections) == 4 else (len(sections) - 3) // 2


def heads_per_gather_for(k: Tensor, v: Tensor, ring_size: int) -> int:
    """As many key/value heads as keep one gather below `BYTES_PER_GATHER`, at least one."""
    batch, tokens, heads, _ = k.shape
    bytes_per_head = ring_size * batch * tokens * (k.shape[3] + v.shape[3]) * k.element_size()
    return max(1, min(heads, BYTES_PER_GATHER // max(1, bytes_per_head)))


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, params: Params, *, kernel: str, backward: str = "ring",
    heads_per_gather: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of local tokens under a plan; shapes as in `ring_attention`, T the same on every rank.

    ``kernel`` is the name of a kernel that was chosen for these inputs. Differentiable in q, k, v and the sinks.
    """
    out, lse = torch.ops.hf_ring_attn.ring_flash_attn_fwd(
        q, k, v, params.sinks, plan.tiles, plan.stops, params.scale, params.softcap, params.deterministic, plan.ring,
        kernel, backward, heads_per_gather or 0,
    )  # fmt: skip
    return out, lse


# The op's name holds "flash_attn" because selective checkpointing policies (TRL's) keep the outputs of ops so named:
# then recomputing a layer neither gathers nor attends again.
@torch.library.custom_op("hf_ring_attn::ring_flash_attn_fwd", mutates_args=())
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, table: Tensor, stops: Tensor, scale: float,
    softcap: float | None, deterministic: bool, ring: str, kernel: str, backward: str, heads_per_gather: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    params = Params(scale, softcap, sinks, deterministic)
    with torch.autocast(q.device.type, enabled=False):  # it would round a kernel's float32 sums to 16 bits
        return _forward(Ring(ring), KERNELS[kernel], q, k, v, tables_of(table, stops)[0], params, heads_per_gather)


@torch.library.custom_op("hf_ring_attn::ring_flash_attn_bwd", mutates_args=())
def _backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None,
    table: Tensor, stops: Tensor, scale: float, softcap: float | None, deterministic: bool, ring: str, kernel: str,
    backward: str, heads_per_gather: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    params = Params(scale, softcap, sinks, deterministic)
    (forward_tiles, backward_tiles), (queries, whole, keys) = tables_of(table, stops), segments_of(table, stops)
    with torch.autocast(q.device.type, enabled=False):
        delta = KERNELS[kernel].delta(dout, out)
        dsinks = _sinks_gradient(delta, lse, sinks)
        job = _Backward(Ring(ring), KERNELS[kernel], dout.contiguous(), q, k, v, lse, delta, params)
        if backward == "gather" and job.ring.size > 1:
            return (*job.by_gather(forward_tiles, queries, whole, heads_per_gather), dsinks)
        return (*job.by_ring(backward_tiles, queries, keys), dsinks)


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _dim = q.shape
    lse = q.new_empty(batch, heads, tokens, dtype=accumulate_dtype(q.dtype))
    return q.new_empty(batch, tokens, heads, v.shape[3]), lse


@_backward_op.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv, dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, table, stops, *rest = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, sinks)
    ctx.plan, ctx.rest = (table, stops), rest


def _backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks = ctx.saved_tensors
    dq, dk, dv, dsinks = torch.ops.hf_ring_attn.ring_flash_attn_bwd(
        dout, q, k, v, out, lse, sinks, *ctx.plan, *ctx.rest
    )
    dsinks = dsinks if sinks is not None else None
    return (dq, dk, dv, dsinks, *[None] * len((*ctx.plan, *ctx.rest)))


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def _forward(
    ring: Ring, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, table: Tensor, params: Params, heads_per_gather: int
) -> tuple[Tensor, Tensor]:
    if ring.size == 1:
        return kernel.forward(q, k, v, table, params)
    batch, tokens, heads, _ = q.shape
    layout = Layout(tokens * ring.size, ring.size, ring.rank)
    per_key_head = heads // k.shape[2]
    out = q.new_empty(batch, tokens, heads, v.shape[3])
    lse = q.new_empty(batch, heads, tokens, dtype=accumulate_dtype(q.dtype))
    for group, (keys, values) in ring.gather_heads((k, v), heads_per_gather or heads_per_gather_for(k, v, ring.size)):
        mine = slice(group.start * per_key_head, group.stop * per_key_head)
        part = kernel.forward(q[:, :, mine], layout.merge(keys), layout.merge(values), table, params.of_heads(mine))
        out[:, :, mine], lse[:, mine] = part
    return out, lse


def _sinks_gradient(delta: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """This rank's share of the sinks' gradient [H].

    A sink has probability exp(sink - lse) and the value 0, so its gradient is -sum(probability * delta).
    """
    if sinks is None:
        return lse.new_empty(0)
    share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


@dataclass(eq=False)
class _Backward:
    """The gradients of one attention, by either road, in the dtype of its inputs."""

    ring: Ring
    kernel: Kernel
    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor
    params: Params

    def by_ring(
        self, tables: Sequence[Tensor], queries: Tensor, keys: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values visit every rank; their accumulators follow one hop behind; dq stays home."""
        new, finish = self.kernel.new_gradient, self.kernel.finish
        home = self._places(self.q, self.k, self.v, queries, keys[self.ring.rank])
        dq = new(self.q, home[0])
        follower = Follower(self.ring)
        for source, (k, v) in self.ring.visits((self.k, self.v)):
            places = self._places(self.q, k, v, queries, keys[source])
            into = Gradients(dq, new(k, places[1]), new(v, places[2]), places)
            self.kernel.backward(self.dout, self.q, k, v, self.lse, self.delta, tables[source], self.params, into)
            follower.add((into.dk, into.dv))
        dk, dv = follower.home()
        return (
            finish(dq, self.q.dtype, home[0]), finish(dk, self.k.dtype, home[1]), finish(dv, self.v.dtype, home[2]),
        )  # fmt: skip

    def by_gather(
        self, table: Tensor, queries: Tensor, whole: Tensor, heads_per_gather: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values are gathered again, a few heads at a time; their accumulators are reduce-scattered."""
        layout = Layout(self.q.shape[1] * self.ring.size, self.ring.size, self.ring.rank)
        per_key_head = self.q.shape[2] // self.k.shape[2]
        new, finish = self.kernel.new_gradient, self.kernel.finish
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        count = heads_per_gather or heads_per_gather_for(self.k, self.v, self.ring.size)
        for group, (keys, values) in self.ring.gather_heads((self.k, self.v), count):
            mine = slice(group.start * per_key_head, group.stop * per_key_head)
            q, k, v = self.q[:, :, mine], layout.merge(keys), layout.merge(values)
            places = self._places(q, k, v, queries, whole)
            into = Gradients(new(q, places[0]), new(k, places[1]), new(v, places[2]), places)
            self.kernel.backward(
                self.dout[:, :, mine], q, k, v, self.lse[:, mine], self.delta[:, mine], table,
                self.params.of_heads(mine), into,
            )  # fmt: skip
            # Finished in the accumulation dtype first: an opaque layout cannot be cut into ranks' shares.
            wide = accumulate_dtype(q.dtype)
            dk, dv = finish(into.dk, wide, places[1]), finish(into.dv, wide, places[2])
            dk, dv = (self.ring.reduce_scatter(layout.split(x)) for x in (dk, dv))
            parts.append((finish(into.dq, q.dtype, places[0]), dk, dv))
        dq, dk, dv = (torch.cat(list(column), 2) for column in zip(*parts, strict=True))
        return dq, _rounded(dk, self.k.dtype), _rounded(dv, self.v.dtype)

    def _places(self, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor) -> tuple[Place, Place, Place]:
        """Where the gradients of these go, given the segments of the queries and keys, as in `segments_of`."""
        of_q, of_k = ((table[:, :3], bool(table[:, 3].any())) for table in (queries, keys))
        widths, scale = (q.shape[3], v.shape[3]), self.params.scale
        return (
            Place("q", tuple(q.shape), widths, *of_q, scale), Place("k", tuple(k.shape), widths, *of_k, scale),
            Place("v", tuple(v.shape), widths, *of_k, 1.0),
        )  # fmt: skip


def _rounded(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.to(dtype)


class _GatherSequence(torch.autograd.Function):
    """[B, T, ...] to [B, S, ...] and back: the adjoint of a gather is the sum over ranks, in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring, layout: Layout) -> Tensor:
        ctx.ring, ctx.layout = ring, layout
        return layout.merge(ring.gather(x, "gathered a sequence").wait()[0])[:, : layout.length].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        wide = ctx.layout.pad(gradient.to(accumulate_dtype(gradient.dtype)), 1)
        return ctx.ring.reduce_scatter(ctx.layout.split(wide)).to(gradient.dtype), None, None


def gather_sequence(x: Tensor, ring: Ring, layout: Layout) -> Tensor:
    """Whole sequences [B, S, ...] in order from every rank's tokens [B, T, ...], padding dropped. Differentiable."""
    return x if ring.size == 1 else _GatherSequence.apply(x, ring, layout)  # type: ignore[no-untyped-call]
