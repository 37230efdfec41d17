"""Ring attention: gathered forward, ring backward, as torch.library ops, and the function for people.

Forward (the all-gather of Llama 3, Dubey et al. 2024, section 3.3.2): keys and values are gathered a few heads at a
time and every query meets all its keys in one softmax, so no partial softmax is ever merged. Backward (zigzag ring):
keys and values travel, their accumulators follow one hop behind in float32, dq stays home. There is no branch for a
kind of mask here: tiles say what meets what.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .comm import Follower, Ring
from .kernels import KERNELS, Gradients, Kernel, Params, Place, accumulate_dtype
from .layout import Layout
from .tables import Plan, Tables

BYTES_PER_GATHER = 256 * 2**20
"""Where the caller names no number of heads: gathered keys and values of one head group stay below this."""



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
        here = Ring(ring)
        tables = Tables.of(table, stops, here.size)
        return forward(here, KERNELS[kernel], q, k, v, tables, params, heads_per_gather)


@torch.library.custom_op("hf_ring_attn::ring_flash_attn_bwd", mutates_args=())
def _backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None,
    table: Tensor, stops: Tensor, scale: float, softcap: float | None, deterministic: bool, ring: str, kernel: str,
    backward: str, heads_per_gather: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    params = Params(scale, softcap, sinks, deterministic)
    here = Ring(ring)
    tables = Tables.of(table, stops, here.size)
    with torch.autocast(q.device.type, enabled=False):
        return gradients(
            here, KERNELS[kernel], dout, q, k, v, out, lse, tables, params, backward, heads_per_gather, {}
        )  # fmt: skip


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


def forward(
    ring: Ring, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tables: Tables, params: Params, heads_per_gather: int
) -> tuple[Tensor, Tensor]:
    if ring.size == 1:
        return kernel.forward(q, k, v, tables.forward, params)
    batch, tokens, heads, _ = q.shape
    per_key_head = heads // k.shape[2]
    out = q.new_empty(batch, tokens, heads, v.shape[3])
    lse = q.new_empty(batch, heads, tokens, dtype=accumulate_dtype(q.dtype))
    for group, keys, values in _seen_by_heads(ring, tables, k, v, heads_per_gather):
        mine = slice(group.start * per_key_head, group.stop * per_key_head)
        part = kernel.forward(q[:, :, mine], keys, values, tables.forward, params.of_heads(mine))
        out[:, :, mine], lse[:, mine] = part
    return out, lse


def _seen_by_heads(
    ring: Ring, tables: Tables, k: Tensor, v: Tensor, heads_per_gather: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The keys and values [B, S, heads, ...] of a plan's forward, a few heads at a time: the whole row's, or those that
    this rank's queries see."""
    count = heads_per_gather or heads_per_gather_for(k, v, ring.size)  # the same on every rank
    exchange = tables.exchange
    if exchange is not None:
        for group, arrived in ring.by_heads((k, v), count, functools.partial(exchange.take, ring)):
            yield group, exchange.arrived(arrived[0]), exchange.arrived(arrived[1])
        return
    layout = Layout(k.shape[1] * ring.size, ring.size, ring.rank)
    for group, (keys, values) in ring.by_heads((k, v), count):
        yield group, layout.merge(keys), layout.merge(values)


def gradients(
    ring: Ring, kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    tables: Tables, params: Params, backward: str, heads_per_gather: int, extra: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and dsinks; the gradients of what a score_mod captures are added to ``extra``, as in `Gradients`."""
    delta = kernel.delta(dout, out)
    dsinks = _sinks_gradient(delta, lse, params.sinks)
    job = _Backward(ring, kernel, tables, dout.contiguous(), q, k, v, lse, delta, params, extra)
    by_gather = tables.exchange is not None or (backward == "gather" and ring.size > 1)
    return (*(job.by_gather(heads_per_gather) if by_gather else job.by_ring()), dsinks)


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
    tables: Tables
    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    delta: Tensor
    params: Params
    extra: dict[str, Tensor]

    def by_ring(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values visit every rank; their accumulators follow one hop behind; dq stays home."""
        new, finish = self.kernel.new_gradient, self.kernel.finish
        keys = self.tables.segments
        home = self._places(self.q, self.k, self.v, keys[self.ring.rank])
        dq = new(self.q, home[0])
        follower = Follower(self.ring)
        for source, (k, v) in self.ring.visits((self.k, self.v)):
            places = self._places(self.q, k, v, keys[source])
            into = Gradients(dq, new(k, places[1]), new(v, places[2]), places, self.extra)
            tiles = self.tables.backward[source]
            self.kernel.backward(self.dout, self.q, k, v, self.lse, self.delta, tiles, self.params, into)
            follower.add((into.dk, into.dv))
        dk, dv = follower.home()
        return (
            finish(dq, self.q.dtype, home[0]), finish(dk, self.k.dtype, home[1]), finish(dv, self.v.dtype, home[2]),
        )  # fmt: skip

    def by_gather(self, heads_per_gather: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values come again, a few heads at a time, as in the forward; their gradients go home and are summed
        there."""
        per_key_head = self.q.shape[2] // self.k.shape[2]
        new, finish = self.kernel.new_gradient, self.kernel.finish
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for group, k, v in _seen_by_heads(self.ring, self.tables, self.k, self.v, heads_per_gather):
            mine = slice(group.start * per_key_head, group.stop * per_key_head)
            q = self.q[:, :, mine]
            places = self._places(q, k, v, self.tables.keys)
            into = Gradients(new(q, places[0]), new(k, places[1]), new(v, places[2]), places, self.extra)
            self.kernel.backward(
                self.dout[:, :, mine], q, k, v, self.lse[:, mine], self.delta[:, mine], self.tables.forward,
                self.params.of_heads(mine), into,
            )  # fmt: skip
            # Finished in the accumulation dtype first: an opaque layout cannot be cut into ranks' shares.
            wide = accumulate_dtype(q.dtype)
            dk, dv = (self._home(finish(x, wide, at)) for x, at in zip((into.dk, into.dv), places[1:], strict=True))
            parts.append((finish(into.dq, q.dtype, places[0]), dk, dv))
        dq, dk, dv = (torch.cat(list(column), 2) for column in zip(*parts, strict=True))
        return dq, _rounded(dk, self.k.dtype), _rounded(dv, self.v.dtype)

    def _home(self, gradient: Tensor) -> Tensor:
        """[B, T, heads, ...] of this rank's own tokens, summed over ranks, from each rank's of the keys that it saw."""
        tokens = self.k.shape[1]
        if self.tables.exchange is not None:
            return self.tables.exchange.give_back(self.ring, gradient, tokens)
        layout = Layout(tokens * self.ring.size, self.ring.size, self.ring.rank)
        return self.ring.reduce_scatter(layout.split(gradient))

    def _places(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> tuple[Place, Place, Place]:
        """Where the gradients of these go, given the segments of the keys as `Tables` has them."""
        of_q, of_k = ((table[:, :3], bool(table[:, 3].any())) for table in (self.tables.queries, keys))
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
