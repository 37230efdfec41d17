"""Where the time of a ring's attention goes, on every rank: in its kernels, or between them.

    torchrun --nproc_per_node 4 recipes/benchmarks/where.py --tokens 32768 65536 131072 [--one-stream] [--save FOLDER]

Contenders in turns, forward and backward: the ring; one rank's work without traffic, on all GPUs at once (what the
ring would take if nothing had to travel); and Ulysses. From torch's profiler, for each: milliseconds a call, those in
which an attention kernel of the forward or of the backward ran, those in which none did but copies and small
kernels, those of NCCL alone, and those of waiting. Attention kernels that take longer than alone share their chip, its
memory or its power with something; gaps are waits.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from hf_ring_attn.attention.call import RingOptions
from hf_ring_attn.attention.kernel_choice import kernel_for
from hf_ring_attn.bench import contenders, results
from hf_ring_attn.bench.peers import PEERS
from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.bench.speed import largest_over
from hf_ring_attn.bench.workload import Workload
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.command_ranks import world
from hf_ring_attn.kernels import KERNELS

ATTENTION = {"forward": re.compile(r"FlashAttentionForwardSm"), "backward": re.compile(r"FlashAttentionBackwardSm")}
"""Names of flash-attn-4's kernels."""
NCCL = re.compile(r"nccl", re.IGNORECASE)
"""Of kernels that move data and wait for other ranks at once."""
WAITING = re.compile(r"signal|barrier")
"""Of kernels that do nothing but wait for another rank, or tell it something."""
SPIN = "spin"
"""In the name of torch's sleep."""
CALLS = 4

Interval = tuple[float, float]


class Spent(NamedTuple):
    """Milliseconds a call. ``forward``, ``backward``: some attention kernel of that pass runs; ``other``: none, but
    something else; ``nccl``: nothing but NCCL, which may wait, too; ``waiting``: nothing, or nothing but waits for
    another rank."""

    total: float
    forward: float
    backward: float
    other: float
    nccl: float
    waiting: float


def covered(intervals: Iterable[Interval]) -> float:
    """The length of a union of intervals."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length


def spent(events: Iterable[tuple[str, Interval]], calls: int) -> Spent:
    """Of the events of a device, in milliseconds."""
    every = list(events)
    of = {kind: [at for name, at in every if pattern.search(name)] for kind, pattern in ATTENTION.items()}
    if not all(of.values()):
        names = sorted({name[:60] for name, _ in every})
        raise RuntimeError(f"no attention kernels were found among {', '.join(names)}")
    moving = [at for name, at in every if not WAITING.search(name)]
    working = [at for name, at in every if not (WAITING.search(name) or NCCL.search(name))]
    total = max(stop for _, (_, stop) in every) - min(start for _, (start, _) in every)
    forward, both, some = covered(of["forward"]), covered([*of["forward"], *of["backward"]]), covered(working)
    moved = covered(moving)
    return Spent(*(x / calls for x in (total, forward, both - forward, some - both, moved - some, total - moved)))


def measured(contender: contenders.Contender, ring: Ring, device: torch.device) -> Spent:
    contender.both.run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        largest_over(ring, device)(0.0)
        torch.cuda._sleep(1_000_000)  # half a millisecond, in which the host gets ahead
        for _ in range(CALLS):
            contender.both.run()
        torch.cuda.synchronize()
    on_device = [
        (event.name(), (event.start_ns() / 1e6, (event.start_ns() + event.duration_ns()) / 1e6))
        for event in found.profiler.kineto_results.events()
        if event.device_type() == torch.profiler.DeviceType.CUDA
    ]
    began = max(stop for name, (_, stop) in on_device if SPIN in name)
    return spent([(name, at) for name, at in on_device if at[0] >= began], CALLS)


def compared(work: Workload, ring: Ring, rounds: int) -> list[dict[str, Any]]:
    """One row for each contender and rank, medians of rounds. A collective."""
    kernel = kernel_for(ring.name, "flash4", work.request())
    by_name = {
        "ring": contenders.in_ring(work, ring, kernel, RingOptions(kernel)),
        "without traffic": contenders.without_traffic(work, ring.size, ring.rank, kernel),
        **{name: make() for name, make in PEERS["ulysses"](work) if "flash" in name},
    }
    found: dict[str, list[Spent]] = {name: [] for name in by_name}
    for _ in range(rounds):
        for name, contender in by_name.items():
            found[name].append(measured(contender, ring, work.device))
    mine = [
        {"tokens": work.tokens, "contender": name, "rank": ring.rank}
        | {field: statistics.median(getattr(one, field) for one in some) for field in Spent._fields}
        for name, some in found.items()
    ]
    rows: list[list[dict[str, Any]]] = [[]] * ring.size
    dist.all_gather_object(rows, mine)
    order = list(by_name)
    return sorted(itertools.chain(*rows), key=lambda row: (order.index(row["contender"]), row["rank"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536])
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="of queries, and of keys and values")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one-stream", action="store_true", help="nothing abreast")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    given = parser.parse_args()
    with world(None) as (ring, device):
        if ring.size == 1:
            parser.error("start this with torchrun, on several GPUs")
        KERNELS["flash4"].two_streams = not given.one_stream
        head, rows = facts(), []
        for tokens in given.tokens:
            heads, kv_heads = given.heads
            work = Workload(tokens, device, heads, kv_heads, given.width, given.width)
            found = compared(work, ring, given.rounds)
            rows += found
            if ring.rank == 0:
                for row in found:
                    spent_here = ", ".join(f"{field} {row[field]:.2f}" for field in Spent._fields)
                    print(f"{tokens:>9,} {row['contender']:24s} rank {row['rank']}: {spent_here} ms", flush=True)
                if given.save:
                    name = f"where_{ring.size}{'_one_stream' if given.one_stream else ''}"
                    results.save(given.save, name, {**head, "calls": CALLS}, rows)


if __name__ == "__main__":
    main()
