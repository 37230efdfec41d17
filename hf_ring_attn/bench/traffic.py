"""Bytes that a rank receives, counted from the plan that it runs by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..kernels import accumulate_dtype
from ..layout import Layout
from ..tables import Plan, Tables
from .workload import Workload


def received(work: Workload, layout: Layout, backward: str) -> tuple[int, int]:
    """Bytes of a forward, and of a backward. Padding of accumulators to a kernel's blocks is not counted."""
    here: Any = SimpleNamespace(name="", size=layout.world_size, rank=layout.rank)
    plan = Plan.of(here, layout, work.mask(layout))
    tables = Tables.of(plan.tiles, plan.stops, layout.world_size)
    numbers = work.kv_heads * (work.width + work.value_width)  # of a token's keys and values
    narrow, wide = numbers * work.dtype.itemsize, numbers * accumulate_dtype(work.dtype).itemsize
    others, tokens = layout.world_size - 1, layout.local_length
    if tables.exchange is not None:
        arriving = sum(tables.exchange.receives) - tables.exchange.receives[layout.rank]
        returning = sum(tables.exchange.sends) - tables.exchange.sends[layout.rank]
        return arriving * narrow, arriving * narrow + returning * wide
    hops = others if backward == "gather" else layout.world_size  # the last hop of a ring brings its own home
    return others * tokens * narrow, others * tokens * narrow + hops * tokens * wide
