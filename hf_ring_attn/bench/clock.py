"""Seconds and memory of calls that take turns, since other work on a shared machine comes and goes."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

SECONDS_PER_TURN = 0.05
"""So long one call is repeated before the next one's turn."""


class Call(NamedTuple):
    """A call, and what it must run inside of, which is entered for each turn and not timed."""

    run: Callable[[], object]
    inside: Callable[[], AbstractContextManager[object]] = nullcontext


class Measured(NamedTuple):
    """Seconds of one call in each round, the slowest rank's; and the most memory that it needed on any rank."""

    seconds: list[float]
    peak_bytes: int


def in_turns(
    calls: Mapping[str, Call], rounds: int, device: torch.device, largest: Callable[[float], float]
) -> dict[str, Measured]:
    """Each call's seconds, the calls taken in turns, each ``rounds`` times.

    Args:
        largest: the largest of what all ranks give it; also keeps them in step.
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
        # In another order each time, alike on all ranks: a chip at its power limit is slower after a long call.
        for name in random.Random(turn).sample(list(calls), len(calls)):
            with calls[name].inside():
                seconds[name].append(largest(_seconds(calls[name].run, counts[name], device, largest)))
    return {name: Measured(seconds[name], peaks[name]) for name in calls}


def _peak(run: Callable[[], object], device: torch.device) -> float:
    """Bytes that a call needs beside what is there before it; 0 on a CPU, where torch does not count them."""
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
    """Seconds of one call, from the mean of ``count`` that follow each other as layers do."""
    if device.type != "cuda":
        largest(0.0)
        began = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - began) / count
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    largest(0.0)
    torch.cuda._sleep(500_000)  # a quarter of a millisecond, in which the host gets ahead, as it is in training
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3 / count
