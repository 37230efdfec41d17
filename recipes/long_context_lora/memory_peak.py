"""What a GPU's memory holds at its fullest moment: allocations of torch, by size and by the code that made them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

ENTRIES = 1_000_000
"""Events that are kept, the newest. A step of 32 layers and 1M tokens has some ten thousand."""
FRAMES = 3
SMALLEST = 1 << 20
"""Bytes below which allocations are added up in one line."""


class MemoryPeak:
    """Records the allocations of one GPU from `start` to `stop`."""

    def __init__(self) -> None:
        self.before = 0

    def start(self) -> None:
        self.before = torch.cuda.memory_allocated()
        # Stacks of allocations alone: to take that of a free, torch clears the exception that ends a recompute.
        torch.cuda.memory._record_memory_history(context="alloc", max_entries=ENTRIES, stacks="python")

    def stop(self) -> dict[str, Any]:
        """The fullest moment, in GiB; every line: GiB together, how many, GiB of one, where."""
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        return fullest(events, self.before)


def fullest(events: Sequence[Mapping[str, Any]], before: int) -> dict[str, Any]:
    """The fullest moment of a trace of torch's allocator.

    Args:
        events: with "action", "addr", "size" and "frames". before: bytes that were allocated when they began.
    """
    total, most, at = before, before, -1
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            total += event["size"]
            if total > most:
                most, at = total, number
        elif event["action"] == "free_requested":
            total -= event["size"]
    alive: dict[int, Mapping[str, Any]] = {}
    freed = 0
    for event in events[: at + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_requested" and alive.pop(event["addr"], None) is None:
            freed += event["size"]  # allocated before
    lines: dict[tuple[int, str], int] = {}
    small = 0
    for event in alive.values():
        if event["size"] < SMALLEST:
            small += event["size"]
            continue
        key = event["size"], where(event["frames"])
        lines[key] = lines.get(key, 0) + 1
    rows = sorted(((size * count, count, size, place) for (size, place), count in lines.items()), reverse=True)
    return {
        "peak_GiB": most / 2**30,
        "from_before_GiB": (before - freed) / 2**30,
        "smaller_GiB": small / 2**30,
        "lines": [(together / 2**30, count, size / 2**30, place) for together, count, size, place in rows],
    }


def where(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost frames outside of torch, "file:line function"; of a backward without Python: "no Python"."""
    places = [x for x in frames if x["filename"].endswith(".py") and "/site-packages/torch/" not in x["filename"]]
    words = [f"{'/'.join(x['filename'].split('/')[-2:])}:{x['line']} {x['name']}" for x in places[:FRAMES]]
    return " < ".join(words) or "no Python"
