"""Memory of one layer's softmax attention in a ring."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..traffic.base import PULLED, WHOLE
from ..traffic.head_groups import head_groups, ring_pass_groups, ring_pass_halves
from .hardware import FLOAT32
from .setup import Setup
from .shape import AttentionShape


class AttentionMemory(NamedTuple):
    """Bytes of a layer's attention, softmax or linear.

    Args:
        name: of what it saves for its backward. saved: when the layer's backward begins. at_backward: those of them
            that are there in its own backward. buffers: of its own backward, or of its forward if it has more.
    """

    name: str
    saved: float
    at_backward: float
    buffers: float


def memory_of_softmax(attention: AttentionShape, setup: Setup) -> AttentionMemory:
    saved = float(setup.tokens_per_rank * qkv_numbers(attention, setup) * setup.itemsize)
    return AttentionMemory("queries, keys, values", saved, saved, attention_bytes(attention, setup))


def saved_attention_bytes(attention: AttentionShape, setup: Setup) -> int:
    """Attention's output and log-sum-exp of one layer."""
    return setup.tokens_per_rank * (attention.out_numbers * setup.itemsize + attention.heads * FLOAT32)


def qkv_numbers(attention: AttentionShape, setup: Setup) -> int:
    """Numbers that attention saves for its backward; its output is not among them if checkpointing saves it.

    Keys and values of another layer are that layer's. A gate: it is saved after its sigmoid, and its product.
    """
    out = 0 if setup.checkpointing and setup.save_attention else attention.out_numbers
    own = 0 if attention.takes_kv else attention.kv_numbers
    return attention.query_numbers + own + out + 2 * attention.has_gate * attention.out_numbers


def normed_numbers(attention: AttentionShape) -> int:
    """Numbers of queries and of the layer's own keys: what RoPE rotates, and norms of heads."""
    own = 0 if attention.takes_kv else attention.kv_heads * attention.key_width
    return attention.query_numbers + own


def attention_bytes(attention: AttentionShape, setup: Setup) -> float:
    """Buffers of a layer's attention: the larger of its gather (forward) and its ring pass (backward).

    The gather: two groups of heads of the whole row. The ring pass: gradient of the output; dq, dk and dv; keys and
    values of two other ranks; in float32, dq of a group and two sets of accumulators of its dk and dv. One GPU computes
    all heads in one group.
    """
    tokens, size = setup.tokens_per_rank, setup.itemsize
    q, k, v = _meta(attention, setup)
    chunk = max(1, tokens // 2)
    heads, around, copies = attention.kv_heads, 0, 1
    if setup.ring_size > 1:
        heads = max(part.stop - part.start for part in ring_pass_groups(q, k, v, chunk, FLOAT32))
        around, copies = 2, 2
    group = tokens * heads * (attention.key_width + attention.value_width)
    wide = tokens * attention.query_numbers * heads / attention.kv_heads
    backward = (
        tokens * (attention.out_numbers + attention.query_numbers + attention.kv_numbers) * size
        + wide * FLOAT32 + around * group * size + copies * group * FLOAT32
    )  # fmt: skip
    if setup.ring_size == 1:
        return float(backward)
    groups = head_groups(q, k, v, _pulls(setup), 0, setup.padded, chunk)
    gathered = setup.padded * (attention.key_width + attention.value_width) * size * (groups[0].stop - groups[0].start)
    return float(max(backward, min(2, len(groups)) * gathered))


def peer_bytes(attention: AttentionShape, setup: Setup) -> float:
    """Buffers of peer-to-peer copies, in one node: two of a rank's keys and values, one of a group's accumulators."""
    if setup.ring_size == 1 or not setup.in_one_node:
        return 0.0
    q, k, v = _meta(attention, setup)
    chunk = max(1, setup.tokens_per_rank // 2)
    first = ring_pass_groups(q, k, v, chunk, FLOAT32)[0]
    halves = ring_pass_halves(q, k[:, :, first], _pulls(setup), chunk)
    sums = len(halves) * (halves[0].stop - halves[0].start) * (attention.key_width + attention.value_width) * FLOAT32
    return float(setup.tokens_per_rank * (2 * attention.kv_numbers * setup.itemsize + sums))


def _pulls(setup: Setup) -> Any:
    """A transport by peer-to-peer copies, as far as functions that choose groups of heads ask for it."""
    ring = SimpleNamespace(size=setup.ring_size)
    return SimpleNamespace(ring=ring, groups=2, bytes_per_gather=PULLED, whole_below=WHOLE)


def _meta(attention: AttentionShape, setup: Setup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of a rank without memory: the ring's own functions choose groups by their shapes."""
    dtype, one = getattr(torch, setup.dtype), attention
    sizes = (one.heads, one.key_width), (one.kv_heads, one.key_width), (one.kv_heads, one.value_width)
    q, k, v = (torch.empty(1, setup.tokens_per_rank, *size, dtype=dtype, device="meta") for size in sizes)
    return q, k, v
