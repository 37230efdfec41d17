"""Groups of heads for each transfer, and the forward's keys and values: all-gathered or by sparse exchange."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Generator

from torch import Tensor

from ..comm.ring import Ring
from ..comm.sparse_exchange import Exchange
from ..sharding.layout import chunks_of
from ..sharding.plan import Tables
from .base import Gather, Traffic, head_halves, in_order
from .gathered_kv import GatheredKV, KVGroup
from .interrupted import interruption_guard

QUERIES, SCORES = 2**15, 2**31
"""Minimum work of one launch, if there are enough heads: two blocks of queries per multiprocessor of a large GPU, and
about a millisecond there, ten times the launch overhead. With one key head per query head (128 heads of 192/128 at 32K
tokens), groups by bytes alone cost a quarter of the forward's speed on an H200: 192 blocks take as long as 264."""
LARGEST = 2**30
"""Most bytes of a group that is enlarged for its launch; a gather holds two or three groups."""
SUMS = 2**29
"""Bytes of the dk and dv accumulators in one ring pass, if launches stay large; transports hold up to three copies.
Llama's eight key heads at 256K tokens on four GPUs need this many."""


def head_groups(
    q: Tensor, k: Tensor, v: Tensor, traffic: Traffic, heads_per_gather: int, keys: int, chunk: int
) -> list[slice]:
    """Splits the key/value heads into groups of ``heads_per_gather``; 0: by `Traffic` and the minimum launch.

    Args:
        q, k, v: of a rank's tokens, [B, T, ...]. Only shapes count, so the groups are the same on every rank.
        keys: tokens gathered per head.
        chunk: tokens of a kernel's call.
    """
    batch, _, heads, width = k.shape
    if not heads_per_gather:
        bytes_per_head = batch * keys * (width + v.shape[3]) * k.element_size()
        queries_per_head = max(1, batch * chunk * q.shape[2] // heads)
        by_bytes, largest = traffic.bytes_per_gather // max(1, bytes_per_head), LARGEST // max(1, bytes_per_head)
        to_launch = _to_launch(queries_per_head, keys)
        least = 1 if _is_short(q, traffic, keys, chunk) else traffic.groups
        heads_per_gather = min(-(-heads // least), max(1, by_bytes, min(to_launch, largest)))
    return [slice(h, min(h + heads_per_gather, heads)) for h in range(0, heads, heads_per_gather)]


def ring_pass_halves(q: Tensor, k: Tensor, traffic: Traffic, chunk: int) -> list[slice]:
    """Splits the key heads of a ring pass in two, so that sending one half overlaps with computing the other.

    One half if there is one head, or nothing to send, or little to compute (`Traffic.whole_below`).
    """
    size, heads = traffic.ring.size, k.shape[2]
    short = _is_short(q, traffic, size * k.shape[1], chunk)
    return [slice(0, heads)] if short else head_halves(heads, size)


def _is_short(q: Tensor, traffic: Traffic, keys: int, chunk: int) -> bool:
    """Returns True if launches cost more than transfers take; arguments as of `head_groups`."""
    return q.shape[0] * chunk * q.shape[2] * keys < traffic.whole_below


def ring_pass_groups(q: Tensor, k: Tensor, v: Tensor, chunk: int, itemsize: int) -> list[slice]:
    """Splits the key/value heads into even groups, one ring pass each: backward memory grows with a group's heads.

    One group if `SUMS` allows it.

    Args:
        q, k, v: of a rank's tokens, as in `head_groups`.
        chunk: tokens of a kernel's call.
        itemsize: bytes of a number of the sums.
    """
    batch, tokens, heads, width = k.shape
    bytes_per_head = batch * tokens * (width + v.shape[3]) * itemsize
    queries_per_head = max(1, batch * chunk * q.shape[2] // heads)
    each = max(1, SUMS // max(1, bytes_per_head), 2 * _to_launch(queries_per_head, tokens))  # two halves
    count = min(-(-heads // each), max(1, heads // 2))
    stops = [-(-heads * number // count) for number in range(count + 1)]  # largest first: the others fit its buffers
    return [slice(start, stop) for start, stop in itertools.pairwise(stops)]


def _to_launch(queries_per_head: int, keys: int) -> int:
    """Returns the number of key heads that a launch needs to reach `QUERIES` and `SCORES`."""
    return max(-(-QUERIES // queries_per_head), -(-SCORES // (queries_per_head * max(1, keys))))


def seen_by_heads(
    traffic: Traffic, tables: Tables, q: Tensor, k: Tensor, v: Tensor, heads_per_gather: int,
    shared: GatheredKV | None = None, two_streams: bool = False,
) -> Generator[KVGroup]:  # fmt: skip
    """Yields the keys and values [B, S, heads, ...] of a plan's forward, one group of heads at a time.

    These are the whole row's, or only those that this rank's queries see. A filled ``shared`` is reused without
    communication, an empty one is filled. ``two_streams``: as in `Gather`; close the generator then, also
    after an error."""
    if shared is not None and shared.parts is not None:
        return (part for part in shared.parts)
    ring, tokens, owners = traffic.ring, k.shape[1], tables.owners
    keys = ring.size * tokens if tables.exchange is None else tables.most
    chunk = tokens // len(chunks_of(ring.size, owners)[ring.rank])
    groups = head_groups(q, k, v, traffic, heads_per_gather, keys, chunk)
    if tables.exchange is None:
        parts = traffic.gathered(Gather(k, v, groups, owners, shared is not None, two_streams))
    else:
        parts = _exchanged(ring, tables.exchange, k, v, groups)
    return parts if shared is None else shared.filling(parts)


def _exchanged(ring: Ring, exchange: Exchange, k: Tensor, v: Tensor, groups: list[slice]) -> Generator[KVGroup]:
    guard = interruption_guard(ring)
    sent = ring.by_heads((k, v), groups, guard.sending(functools.partial(exchange.take, ring)))
    return in_order(sent, exchange.arrived, guard)
