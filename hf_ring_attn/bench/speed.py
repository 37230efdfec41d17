"""Speed of every contender on a workload, as a share of the same kernel on one device in the same run."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import traffic
from ..attention.call import RingOptions
from ..attention.kernel_choice import kernel_for
from ..comm.ring import Ring
from ..sharding.layout import Layout
from . import contenders
from .clock import CALLS_BEFORE, Timed, in_turns
from .peers import PEERS
from .workload import Workload, received

Made = tuple[str, Callable[[], contenders.Contender]]
ONE = "one device"


def measure(
    work: Workload, ring: Ring, chosen: Sequence[RingOptions], *, ring_size: int, kernel: str,
    against: Sequence[str], rounds: int, largest: Callable[[float], float],
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns one row per contender: seconds of each round, TFLOP/s per device, share of one device, memory.

    Args:
        ring_size: size of the ring that one process simulates; the real ring's size if there is one.
        largest: as in `clock.in_turns`.
    """
    kernel = kernel_for(ring.name, kernel, work.request())
    made: dict[str, contenders.Contender] = {}
    failed: dict[str, str] = {}
    for name, make in _contestants(work, ring, chosen, ring_size, kernel, against):
        reason = ""
        try:
            contender = make()
            for call in (contender.forward, contender.both):
                with call.inside():
                    call.run()
        except (ImportError, RuntimeError, ValueError, TypeError, AssertionError, AttributeError) as error:
            # Any error of another package on this workload is its result.
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if largest(float(bool(reason))):
            failed[name] = reason or "another rank could not"
        else:
            made[name] = contender
    calls: dict[str, Timed] = {}
    for name, contender in made.items():
        calls[name + " forward"], calls[name + " both"] = contender.forward, contender.both
    found = in_turns(calls, rounds, work.device, largest)
    forward_flops, backward_flops = work.flops()
    ours = {contenders.name_of(one): one for one in chosen}
    rows: list[dict[str, Any]] = []
    for name, contender in made.items():
        row: dict[str, Any] = {"contender": name, "tokens": work.tokens, "kernel": kernel}
        for kind, flops in (("forward", forward_flops), ("both", forward_flops + backward_flops)):
            measured, alone = found[f"{name} {kind}"], found[f"{ONE} {kind}"]
            rate = [flops * contender.share / seconds / 1e12 for seconds in measured.seconds]
            reference = [flops / seconds / 1e12 for seconds in alone.seconds]
            row[kind] = {
                "seconds": measured.seconds,
                "tflops": statistics.median(rate),
                "peak_bytes": measured.peak_bytes,
                "share": statistics.median(a / b for a, b in zip(rate, reference, strict=True)),
            }
        options = ours.get(name)
        if options is not None:
            pulled = traffic.transport_name(ring, options.traffic) == "pulls"
            row["buffer_bytes"] = traffic.buffer_bytes(ring) if pulled else 0
            row["bytes_received"] = received(work, Layout(work.tokens, ring.size, ring.rank))
        rows.append(row)
    return [*rows, *({"contender": name, "tokens": work.tokens, "failed": reason} for name, reason in failed.items())]


def _contestants(
    work: Workload, ring: Ring, chosen: Sequence[RingOptions], ring_size: int, kernel: str, against: Sequence[str]
) -> Iterator[Made]:
    yield ONE, lambda: contenders.one_device(work, kernel)
    if ring.size == 1 and ring_size > 1:
        rank = ring_size // 2
        for heads in dict.fromkeys(one.heads_per_gather for one in chosen):
            name = f"rank {rank} of {ring_size}" + (f" heads {heads}" if heads else "")
            yield name, functools.partial(contenders.without_traffic, work, ring_size, rank, kernel, heads)
    for one in chosen if ring.size > 1 else ():
        yield contenders.name_of(one), functools.partial(contenders.in_ring, work, ring, kernel, one)
    for peer in against:
        yield from PEERS[peer](work)


def announced(
    works: Sequence[Workload], ring: Ring, chosen: Sequence[RingOptions], ring_size: int, against: Sequence[str],
    rounds: int,
) -> str:  # fmt: skip
    """A line on what `measure` is about to do with each of ``works``; it takes time before the first row."""
    names = [name for name, _ in _contestants(works[0], ring, chosen, ring_size, "", against)]
    calls = 2 * (1 + CALLS_BEFORE + rounds) * len(names) * len(works)
    lengths = ", ".join(f"{work.tokens:,}" for work in works)
    where = f"{lengths} tokens on {works[0].device.type}"
    return f"measuring {', '.join(names)}: {where}, about {calls} calls (short ones are repeated)"


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Formats rows as lines of text."""
    for row in rows:
        head = f"{row['tokens']:>9,} {row['contender']:26s}"
        if "failed" in row:
            yield f"{head} {row['failed']}"
            continue
        parts = [
            f"{1e3 * statistics.median(row[kind]['seconds']):9.2f} ms {_rate(row[kind]['tflops'])} TFLOP/s "
            f"{row[kind]['share']:6.1%}"
            for kind in ("forward", "both")
        ]
        peak = row["both"]["peak_bytes"] + row.get("buffer_bytes", 0)
        memory = f"{peak / 2**30:6.2f} GiB" if peak else ""
        moved = row.get("bytes_received")
        bytes_moved = f" {moved[0] / 2**20:6.0f} + {moved[1] / 2**20:.0f} MiB" if moved else ""
        yield f"{head} {' | '.join(parts)} {memory}{bytes_moved}".rstrip()


def _rate(tflops: float) -> str:
    return f"{tflops:6.0f}" if tflops >= 10 else f"{tflops:6.2g}"


HEAD = (
    f"{'tokens':>9} {'':26s} {'forward':>12} {'per device':>14} {'vs one':>6} | {'with backward':>12} "
    f"{'per device':>14} {'vs one':>6} {'memory':>10} {'received':>14}"
)


def largest_over(ring: Ring, device: torch.device) -> Callable[[float], float]:
    """A function that takes the maximum over a ring's ranks; it synchronizes them."""

    def largest(number: float) -> float:
        if ring.size == 1:
            return number
        mine = torch.tensor([number], dtype=torch.float64, device=ring.small_device(device))
        return float(ring.gather(mine, "compared times").wait()[0].max())

    return largest
