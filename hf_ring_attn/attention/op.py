"""Ring attention: gathered forward, ring backward, as torch.library ops, and as an autograd function of the same.

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

from ..comm.first_order import first_order_only, inside_transforms, refuse_transforms
from ..dtypes import accumulate_dtype
from ..kernels import KERNELS, Kernel, Params
from ..sharding.plan import Plan
from ..traffic import GatheredKV, LayerRole, Traffic, gathered_kv_for, seen_by_heads
from .backward import gradients
from .call import Call, Results, RingOptions
from .saved_results import saved_or

UNSAFE = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
"""Tags of ops that communicate: inductor excludes them from CUDA graphs."""

_attentions = 0
_lacks_backward = False


def attentions() -> int:
    """Returns how often the ring's forward ran in this process."""
    return _attentions


def lacks_backward() -> bool:
    """Returns True if no backward ran since the latest attention that had a graph. Compiled code does not note it."""
    return _lacks_backward


def note_backward(ran: bool) -> None:
    """Notes an attention with a graph, or its backward."""
    global _lacks_backward
    _lacks_backward = not ran


def count_attention() -> None:
    """Counts a forward, inside the op, since compiled code runs nothing else."""
    global _attentions
    _attentions += 1


def attend(call: Call, shared: GatheredKV | LayerRole | None = None) -> tuple[Tensor, Tensor]:
    """Computes out [B, T, H, Dv] and lse [B, H, T] of a call; differentiable in q, k, v and the sinks.

    ``shared``: gathered K/V to fill or to reuse (same options, keys, values and plan on every rank); in compiled code,
    which may run an op twice or not at all, the layer's role.
    """
    refuse_transforms("ring attention", call.q, call.k, call.v, call.params.sinks)
    store, role = (None, None) if shared is None else (shared.number, shared.role)
    attention: Any = torch.ops.hf_ring_attn.ring_flash_attn_fwd
    if not _seen_by_torch(call.q, call.k, call.v):
        differentiated = call.q, call.k, call.v, call.params.sinks
        has_graph = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiated)
        attention = _Attention.apply if has_graph else torch.no_grad()(_computed)
    out, lse = attention(*flatten(call), store, role)
    return out, lse


def _seen_by_torch(*tensors: Tensor) -> bool:
    """Returns True where something must see the op: a compiler, a dispatch mode (a policy of selective checkpointing, a
    counter of FLOPs), a transform of torch.func, a subclass of tensors, or tensors without values.

    Elsewhere torch.library's Python would cost the host about as much as the launches of a short row.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or inside_transforms():
        return True
    return any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta for x in tensors)


FLAT = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor tiles, Tensor stops, str ring, float scale, float? softcap, "
    "bool deterministic, str kernel, str backward, SymInt heads_per_gather, str traffic"
)
"""A call as arguments of an op, which takes only tensors, numbers and strings."""


def flatten(call: Call) -> tuple[Any, ...]:
    """The arguments `FLAT` of a call."""
    plan, params, options = call.plan, call.params, call.options
    return (
        call.q, call.k, call.v, params.sinks, plan.tiles, plan.stops, plan.ring, params.scale, params.softcap,
        params.deterministic, options.kernel, options.backward, options.heads_per_gather, options.traffic,
    )  # fmt: skip


def unflatten(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tiles: Tensor, stops: Tensor, ring: str, scale: float,
    softcap: float | None, deterministic: bool, *options: Any,
) -> Call:  # fmt: skip
    """The inverse of `flatten`."""
    plan, params = Plan(ring, tiles, stops), Params(scale, softcap, sinks, deterministic)
    return Call(q, k, v, plan, params, RingOptions(*options))


def _computed(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The results of the forward op, of its arguments."""
    *flat, store, role = arguments
    call = unflatten(*flat)

    def compute() -> tuple[Tensor, Tensor]:
        count_attention()
        with torch.autocast(call.q.device.type, enabled=False):  # autocast would round float32 sums to 16 bits
            traffic = call.transport()
            shared = gathered_kv_for(store, role, traffic.ring, call.plan.tables, call.k, call.v)
            return forward(call, traffic, KERNELS[call.options.kernel], shared)

    return saved_or(compute, call.q)


def _gradients(out: Tensor, lse: Tensor, dout: Tensor, *flat: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of the backward op, of its arguments."""
    call = unflatten(*flat)
    with torch.autocast(dout.device.type, enabled=False):
        return gradients(call, Results(out, lse, dout), call.transport(), KERNELS[call.options.kernel])


# The op's name holds "flash_attn" because selective checkpointing policies (TRL's) save the outputs of ops so
# named, as `saved_results` does: then a layer's recompute neither gathers nor attends again.
_forward_op = torch.library.custom_op(
    "hf_ring_attn::ring_flash_attn_fwd", _computed, mutates_args=(), tags=UNSAFE,
    schema=f"({FLAT}, Tensor? store, Tensor? role) -> (Tensor, Tensor)",
)  # fmt: skip
_backward_op = torch.library.custom_op(
    "hf_ring_attn::ring_flash_attn_bwd", _gradients, mutates_args=(), tags=UNSAFE,
    schema=f"(Tensor out, Tensor lse, Tensor dout, {FLAT}) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _dim = q.shape
    lse = q.new_empty(batch, heads, tokens, dtype=accumulate_dtype(q.dtype))
    return q.new_empty(batch, tokens, heads, v.shape[3]), lse


@_backward_op.register_fake
def _(
    out: Tensor, lse: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv, dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, *rest, _store, _role = inputs
    out, lse = output
    note_backward(False)
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, sinks)
    ctx.rest = rest


@first_order_only("ring attention")
def _backward(ctx: Any, saved: tuple[Any, ...], dout: Tensor, _dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks = saved
    note_backward(True)
    backward = torch.ops.hf_ring_attn.ring_flash_attn_bwd if _seen_by_torch(dout, q, k, v) else _gradients
    *found, dsinks = backward(out, lse, dout, q, k, v, sinks, *ctx.rest)
    return (*found, None if sinks is None else dsinks, *[None] * len(ctx.rest), None, None)


_forward_op.register_autograd(_backward, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The op, without torch.library."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        found = _computed(*arguments)
        _setup_context(ctx, arguments, found)  # by itself, torch would bind its arguments by name at each call
        return found

    backward = staticmethod(_backward)


def forward(call: Call, traffic: Traffic, kernel: Kernel, shared: GatheredKV | None = None) -> tuple[Tensor, Tensor]:
    """The forward of a call by a transport and a kernel: out and lse, as `attend`."""
    q, k, v, tables, params = call.q, call.k, call.v, call.plan.tables, call.params
    if traffic.ring.size == 1:
        return kernel.forward(q, k, v, tables.forward, params)
    batch, tokens, heads, _ = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[3])
    lse = q.new_empty(batch, heads, tokens, dtype=accumulate_dtype(q.dtype))
    two_streams = kernel.two_streams and params.score_mod is None
    seen = seen_by_heads(traffic, tables, q, k, v, call.options.heads_per_gather, shared, two_streams)
    with closing(seen):
        for part in seen:
            mine = call.query_heads(part.heads)
            with part.at:
                if mine == slice(0, heads):  # all heads at once need no slices, and lse no copy
                    _, lse = kernel.forward(q, part.k, part.v, tables.forward, params, out)
                else:
                    _, lse[:, mine] = kernel.forward(
                        q[:, :, mine], part.k, part.v, tables.forward, params.of_heads(mine), out[:, :, mine]
                    )
            del part  # before the next one arrives
    return out, lse
