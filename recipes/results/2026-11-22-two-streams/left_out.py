"""What a ring by pulls takes when parts of its traffic are left out (its numbers are wrong then), beside one rank's
work without traffic and Ulysses; and the GPUs' clocks and power meanwhile. left_out.json has what a forerunner told
at 409f490:

    torchrun --nproc_per_node 4 left_out.py

For each way and rank: milliseconds a call, those of its attention kernels (with two streams they overlap), MHz, watts.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from hf_ring_attn.bench import roads
from hf_ring_attn.bench.peers import PEERS
from hf_ring_attn.bench.speed import largest_over
from hf_ring_attn.bench.workload import Workload
from hf_ring_attn.bench.world import world
from hf_ring_attn.kernels import KERNELS
from hf_ring_attn.traffic import pulls

SECONDS, ROUNDS = 0.8, 2
ATTENTION = re.compile(r"FlashAttention(Forward|Backward)Sm")
QUERY = "timestamp,index,clocks.sm,power.draw,clocks_event_reasons.active"
left_out: set[str] = set()


def moved_on(self: Any, sums: Any, lane: int, room: int, first: bool) -> Any:
    """`Pulls._moved_on` without what is left out."""
    size = sum(x.nbytes for x in sums)
    box = slice(lane * room, lane * room + size)
    flat = torch.empty(size, dtype=torch.uint8, device=self.device)
    arriving = pulls._like(flat, sums)
    self.held[lane] = arriving, sums
    self.sums_stream.wait_stream(self._compute())
    signals = "signals" not in left_out
    with torch.cuda.stream(self.sums_stream):
        if not first and signals:
            self._wait_for_signal(self._next, pulls.TAKEN + lane)
        if "the outbox" not in left_out:
            for into, x in zip(pulls._like(self.outboxes.mine[box], sums), sums, strict=True):
                into.copy_(x)
        if signals:
            self.outboxes.handle.put_signal(self._next, pulls.READY + lane, self.lost_after_ms)
            self._wait_for_signal(self._previous, pulls.READY + lane)
        if "pulls of sums" not in left_out:
            flat.copy_(self.outboxes.of[self._previous][box])
        if signals:
            self.outboxes.handle.put_signal(self._previous, pulls.TAKEN + lane, self.lost_after_ms)
        return pulls._Coming(arriving, self._event(self.sums_stream))


wait = pulls.Pulls._wait_for_signal
pulls.Pulls._moved_on = moved_on
pulls.Pulls._wait_for_signal = lambda *args: None if "signals" in left_out else wait(*args)


def attention_milliseconds(run: Any, calls: int = 3) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    sums = {"Forward": 0.0, "Backward": 0.0}
    for event in found.profiler.kineto_results.events():
        match = ATTENTION.search(event.name())
        if match and event.device_type() == torch.profiler.DeviceType.CUDA:
            sums[match.group(1)] += event.duration_ns() / 1e6 / calls
    return sums


def sampled(path: str) -> list[tuple[float, int, float, float, str]]:
    rows = []
    for line in Path(path).read_text().splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5:
            at = datetime.datetime.strptime(parts[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
            rows.append((at, int(parts[1]), float(parts[2]), float(parts[3]), parts[4]))
    return rows


with world(None) as (ring, device), tempfile.NamedTemporaryFile("w") as log:
    watching = ring.rank == 0 and subprocess.Popen(
        ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms", "100"], stdout=log
    )
    largest, rows = largest_over(ring, device), []
    for tokens in (2**16, 2**17):
        work = Workload(tokens, device)
        by_pulls = roads.in_ring(work, ring, "flash4", roads.Options(traffic="pulls"))
        alone = roads.without_traffic(work, ring.size, ring.rank, "flash4")
        (ulysses,) = (make() for name, make in PEERS["ulysses"](work) if "flash" in name)
        parts = ("the outbox", "pulls of sums", "signals")
        ways: dict[str, tuple[roads.Road, tuple[str, ...], bool]] = {
            "ring": (by_pulls, (), False), "ring, two streams": (by_pulls, (), True),
            **{f"ring without {part}": (by_pulls, (part,), False) for part in parts},
            "ring without these": (by_pulls, parts, False), "without traffic": (alone, (), False),
            "without traffic, two streams": (alone, (), True), "Ulysses": (ulysses, (), False),
        }  # fmt: skip
        for turn in range(ROUNDS):
            for name, (road, without, two) in ways.items():
                left_out.clear()
                left_out.update(without)
                KERNELS["flash4"].abreast = two
                road.both.run()
                torch.cuda.synchronize()
                largest(0.0)
                calls = math.ceil(SECONDS / (0.2 * (tokens / 2**17) ** 2))
                began = time.time()
                for _ in range(calls):
                    road.both.run()
                torch.cuda.synchronize()
                ended = time.time()
                largest(0.0)
                rows.append({
                    "tokens": tokens, "way": name, "turn": turn, "rank": ring.rank, "began": began, "ended": ended,
                    "milliseconds": 1e3 * (ended - began) / calls, **attention_milliseconds(road.both.run),
                })  # fmt: skip
    everything: list[Any] = [None] * ring.size
    dist.all_gather_object(everything, rows)
    if watching:
        watching.terminate()
        samples = sampled(log.name)
        for row in (row for some in everything for row in some):
            during = [x for x in samples if x[1] == row["rank"] and row["began"] + 0.15 <= x[0] <= row["ended"]]
            row["MHz"], row["watts"] = (statistics.mean(x[at] for x in during) for at in (2, 3))
            row["reasons"] = sorted({x[4] for x in during})
            print(json.dumps(row), flush=True)
