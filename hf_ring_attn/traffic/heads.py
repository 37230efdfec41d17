"""Which heads travel together, and by which way: keys of the whole row, or those that a sparse plan has."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import Tensor

from ..comm import Ring
from ..exchange import Exchange
from ..layout import Owners
from .base import Traffic
from .kept import Kept, Part


def head_groups(k: Tensor, v: Tensor, traffic: Traffic, heads_per_gather: int) -> list[slice]:
    """The key/value heads in groups of ``heads_per_gather``; 0: as `Traffic` has it. The same on every rank."""
    batch, tokens, heads, _ = k.shape
    if not heads_per_gather:
        bytes_per_head = traffic.ring.size * batch * tokens * (k.shape[3] + v.shape[3]) * k.element_size()
        most = traffic.bytes_per_gather // max(1, bytes_per_head)
        heads_per_gather = max(1, min(-(-heads // traffic.groups), most))
    return [slice(h, min(h + heads_per_gather, heads)) for h in range(0, heads, heads_per_gather)]


def seen_by_heads(
    traffic: Traffic, exchange: Exchange | None, owners: Owners, k: Tensor, v: Tensor, heads_per_gather: int,
    kept: Kept | None = None,
) -> Iterator[Part]:  # fmt: skip
    """The keys and values [B, S, heads, ...] of a plan's forward, a few heads at a time: the whole row's, or those that
    this rank's queries see. Where ``kept`` has them nothing travels; where it is empty they are left there."""
    if kept is not None and kept.parts is not None:
        return iter(kept.parts)
    ring, groups = traffic.ring, head_groups(k, v, traffic, heads_per_gather)
    if exchange is None:
        parts = traffic.gathered(k, v, groups, owners, keep=kept is not None)
    else:
        parts = _exchanged(ring, exchange, k, v, groups)
    return parts if kept is None else kept.filling(parts)


def _exchanged(ring: Ring, exchange: Exchange, k: Tensor, v: Tensor, groups: list[slice]) -> Iterator[Part]:
    for group, arrived in ring.by_heads((k, v), groups, functools.partial(exchange.take, ring)):
        yield group, exchange.arrived(arrived[0]), exchange.arrived(arrived[1])
