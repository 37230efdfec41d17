"""Time and memory of interleaved calls, since the load of a shared machine varies."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

SECONDS_PER_TURN = 0.05
"""Seconds for which one call is repeated in its turn."""

CALLS_BEFORE = 3
"""Calls of each before the rounds: to compile it, for its memory, and for its time."""


class Timed(NamedTuple):
    """A call, and the context it runs in, which is entered for each turn and not timed."""

    run: Callable[[], object]
    inside: Callable[[], AbstractContextManager[object]] = nullcontext


class Measured(NamedTuple):
    """Seconds of a call in each round, on the slowest rank, and its peak memory on any rank."""

    seconds: list[float]
    peak_bytes: int


def in_turns(
    calls: Mapping[str, Timed], rounds: int, device: torch.device, largest: Callable[[float], float]
) -> dict[str, Measured]:
    """Measures calls in turns, each ``rounds`` times.

    Args:
        largest: the maximum over ranks; also synchronizes them.
    """
    counts: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for name, call in calls.items():
        with call.inside():
            call.run()  # loads and compiles
            peaks[name] = int(largest(_peak(call.run, device)))
            counts[name] = max(1, math.ceil(SECONDS_PER_TURN / largest(_seconds(call.run, 1, device, largest))))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        # A new order each time, the same on all ranks: a chip at its power limit is slower after a long call.
        for name in random.Random(turn).sample(list(calls), len(calls)):
            with calls[name].inside():
                seconds[name].append(largest(_seconds(calls[name].run, counts[name], device, largest)))
    return {name: Measured(seconds[name], peaks[name]) for name in calls}


def _peak(run: Callable[[], object], device: torch.device) -> float:
    """Peak bytes of a call above those allocated before it; 0 on a CPU, where torch does not count."""
    if device.type != "cuda":
        run()
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def _seconds(run: Callable[[], object], count: int, device: torch.device, largest: Callable[[float], float]) -> float:
    """Mean seconds of ``count`` consecutive calls, as of layers."""
    if device.type != "cuda":
        largest(0.0)
        began = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - began) / count
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    largest(0.0)
    torch.cuda._sleep(500_000)  # a quarter of a millisecond, so that the host runs ahead, as in training
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3 / count
