"""Ring attention: gathered forward, ring backward, as torch.library ops.

Forward (the all-gather of Llama 3, Dubey et al. 2024, section 3.3.2): keys and values are gathered a few heads at a
time and every query sees all its keys in one softmax, so partial softmaxes are never merged. Backward (zigzag ring):
keys and values are passed around with float32 accumulators of their gradients, added to in place; dq stays local. No
mask has a branch of code here: tiles describe all masks.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from ..comm.first_order import first_order_only, refuse_transforms
from ..comm.ring import Ring
from ..kernels import KERNELS, Kernel, Params, accumulate_dtype
from ..sharding.plan import Plan, Tables
from ..traffic import GatheredKV, LayerRole, Traffic, gathered_kv_for, seen_by_heads, traffic_of
from .backward import gradients

UNSAFE = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
"""Tags of ops that communicate: inductor excludes them from CUDA graphs."""

_attentions = 0


def attentions() -> int:
    """Returns how often the ring's forward ran in this process."""
    return _attentions


def count_attention() -> None:
    """Counts a forward, inside the op, since compiled code runs nothing else."""
    global _attentions
    _attentions += 1


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, params: Params, *, kernel: str, backward: str = "ring",
    heads_per_gather: int | None = None, traffic: str = "auto", kept: GatheredKV | LayerRole | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of local tokens under a plan; shapes as in `ring_attention`, T the same on every rank.

    ``kernel`` is the name of a kernel that was chosen for these inputs. Differentiable in q, k, v and the sinks.
    ``kept``: gathered K/V to fill or to reuse (same options, keys, values and plan on every rank); in compiled code,
    which may run an op twice or not at all, the layer's role.
    """
    refuse_transforms("ring attention", q, k, v, params.sinks)
    out, lse = torch.ops.hf_ring_attn.ring_flash_attn_fwd(
        q, k, v, params.sinks, plan.tiles, plan.stops, params.scale, params.softcap, params.deterministic, plan.ring,
        kernel, backward, heads_per_gather or 0, traffic, *((None, None) if kept is None else (kept.number, kept.role)),
    )  # fmt: skip
    return out, lse


# The op's name holds "flash_attn" because selective checkpointing policies (TRL's) save the outputs of ops so
# named: then a layer's recompute neither gathers nor attends again.
@torch.library.custom_op("hf_ring_attn::ring_flash_attn_fwd", mutates_args=(), tags=UNSAFE)
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, table: Tensor, stops: Tensor, scale: float,
    softcap: float | None, deterministic: bool, ring: str, kernel: str, backward: str, heads_per_gather: int,
    traffic: str, kept: Tensor | None = None, role: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    count_attention()
    params = Params(scale, softcap, sinks, deterministic)
    with torch.autocast(q.device.type, enabled=False):  # autocast would round float32 sums to 16 bits
        transport = traffic_of(Ring(ring), q.device, traffic)
        tables = Tables.of(table, stops, transport.ring.size)
        known = gathered_kv_for(kept, role, transport.ring, tables, k, v)
        return forward(transport, KERNELS[kernel], q, k, v, tables, params, heads_per_gather, known)


@torch.library.custom_op("hf_ring_attn::ring_flash_attn_bwd", mutates_args=(), tags=UNSAFE)
def _backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None,
    table: Tensor, stops: Tensor, scale: float, softcap: float | None, deterministic: bool, ring: str, kernel: str,
    backward: str, heads_per_gather: int, traffic: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    params = Params(scale, softcap, sinks, deterministic)
    transport = traffic_of(Ring(ring), q.device, traffic)
    tables = Tables.of(table, stops, transport.ring.size)
    with torch.autocast(q.device.type, enabled=False):
        return gradients(
            transport, KERNELS[kernel], dout, q, k, v, out, lse, tables, params, backward, heads_per_gather, {}
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
    q, k, v, sinks, table, stops, *rest, _kept, _role = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, sinks)
    ctx.plan, ctx.rest = (table, stops), rest


@first_order_only("ring attention")
def _backward(ctx: Any, saved: tuple[Any, ...], dout: Tensor, _dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks = saved
    dq, dk, dv, dsinks = torch.ops.hf_ring_attn.ring_flash_attn_bwd(
        dout, q, k, v, out, lse, sinks, *ctx.plan, *ctx.rest
    )
    dsinks = dsinks if sinks is not None else None
    return (dq, dk, dv, dsinks, *[None] * len((*ctx.plan, *ctx.rest)), None, None)


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def forward(
    traffic: Traffic, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tables: Tables, params: Params,
    heads_per_gather: int, kept: GatheredKV | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if traffic.ring.size == 1:
        return kernel.forward(q, k, v, tables.forward, params)
    batch, tokens, heads, _ = q.shape
    per_key_head = heads // k.shape[2]
    out = q.new_empty(batch, tokens, heads, v.shape[3])
    lse = q.new_empty(batch, heads, tokens, dtype=accumulate_dtype(q.dtype))
    seen = seen_by_heads(
        traffic, tables.exchange, tables.owners, q, k, v, heads_per_gather, kept, most=tables.most,
        two_streams=kernel.two_streams and params.score_mod is None,
    )  # fmt: skip
    with closing(seen):
        for part in seen:
            mine = slice(part.heads.start * per_key_head, part.heads.stop * per_key_head)
            with part.at:
                _, lse[:, mine] = kernel.forward(
                    q[:, :, mine], part.k, part.v, tables.forward, params.of_heads(mine), out[:, :, mine]
                )
    return out, lse
