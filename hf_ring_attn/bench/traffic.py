"""Bytes that a rank receives, counted from its plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..kernels import accumulate_dtype
from ..sharding.layout import Layout
from ..sharding.plan import Plan, Tables
from .workload import Workload


def tokens_received(tables: Tables, layout: Layout) -> tuple[int, int]:
    """Tokens for which a rank receives keys and values in each pass, and tokens for which it receives accumulators."""
    if tables.exchange is None:  # both for every other rank's tokens: accumulators end at their owner
        others = (layout.world_size - 1) * layout.local_length
        return others, others
    sends, receives = tables.exchange.sends, tables.exchange.receives
    return sum(receives) - receives[layout.rank], sum(sends) - sends[layout.rank]


def received(work: Workload, layout: Layout) -> tuple[int, int]:
    """Bytes received in a forward and in a backward, without padding of accumulators to a kernel's blocks."""
    here: Any = SimpleNamespace(name="", size=layout.world_size, rank=layout.rank)
    plan = Plan.of(here, layout, work.mask(layout))
    keys, sums = tokens_received(plan.tables, layout)
    numbers = work.kv_heads * (work.width + work.value_width)  # elements of a token's keys and values
    narrow, wide = numbers * work.dtype.itemsize, numbers * accumulate_dtype(work.dtype).itemsize
    return keys * narrow, keys * narrow + sums * wide
