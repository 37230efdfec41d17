"""How long the host takes to queue a layer's attention, beside how long the GPU takes to compute it.

    torchrun --nproc_per_node 2 recipes/benchmarks/host_time.py [--tokens 8192 16384 32768] [--profile] [--save FOLDER]

Contenders in turns, forward and backward: the ring; the ring with backward="gather"; the ring with its heads split as
in long rows; and the same kernel on one device. While the GPU sleeps, the host queues some calls: that is the host's
time. Then the GPU computes what is queued: that is the GPU's. Where the host's is the longer one, the GPU idles, unless
work of other layers waits there.
``--profile``: the ring's Python functions by their own time. On CPUs (``--device cpu``) both are one.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hf_ring_attn.attention.backward import gradients
from hf_ring_attn.attention.call import Call, Results, RingOptions
from hf_ring_attn.attention.kernel_choice import kernel_for
from hf_ring_attn.attention.op import forward
from hf_ring_attn.bench import contenders, results
from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.bench.workload import Workload
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.command_ranks import world
from hf_ring_attn.kernels import KERNELS
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.plan import Plan
from hf_ring_attn.traffic import traffic_of

CALLS = 10
"""Of a contender in one measurement: their kernels must fit the queue of a GPU, which takes some thousand."""
SLEEP = 200_000_000
"""Clock cycles, about 0.1 s: longer than the host takes for `CALLS`."""


def measured(contender: contenders.Contender, ring: Ring, device: torch.device) -> tuple[float, float]:
    """Milliseconds a call of the host, and of the GPU (on a CPU: of the host). A collective."""
    contender.both.run()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    ring.numbers(0, ring.small_device(device), "began to measure")  # the ranks begin together
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
    if on_gpu:
        torch.cuda._sleep(SLEEP)
        events[0].record()
    began = time.perf_counter()
    for _ in range(CALLS):
        contender.both.run()
    host = (time.perf_counter() - began) * 1000 / CALLS
    if not on_gpu:
        return host, host
    events[1].record()
    torch.cuda.synchronize(device)
    return host, events[0].elapsed_time(events[1]) / CALLS


def compared(work: Workload, ring: Ring, kernel: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each contender: medians of rounds on this rank. A collective."""
    chosen = kernel_for(ring.name, kernel, work.request())
    by_name = {
        "ring": (contenders.in_ring(work, ring, chosen, RingOptions(chosen)), None),
        "ring, gathers": (contenders.in_ring(work, ring, chosen, RingOptions(chosen, backward="gather")), None),
        "ring, heads split": (contenders.in_ring(work, ring, chosen, RingOptions(chosen)), 0),
        "one device": (contenders.one_device(work, chosen), None),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in by_name}
    for _ in range(rounds):
        for name, (contender, below) in by_name.items():
            with split_below(ring, work.device, below):
                found[name].append(measured(contender, ring, work.device))
    return [
        {
            "tokens": work.tokens, "contender": name, "kernel": chosen, "rank": ring.rank,
            "host_ms": statistics.median(host for host, _ in times),
            "gpu_ms": statistics.median(gpu for _, gpu in times), "rounds": times,
        }
        for name, times in found.items()
    ]  # fmt: skip


def split_below(ring: Ring, device: torch.device, scores: int | None) -> AbstractContextManager[Any]:
    """Attention of fewer scores is not split; None: as the ring's transport has it."""
    return nullcontext() if scores is None else mock.patch.object(traffic_of(ring, device), "whole_below", scores)


def profiled(work: Workload, ring: Ring, kernel: str) -> pstats.Stats:
    """The Python functions of the ring's forward and backward, without autograd, which would run one in a thread."""
    chosen = kernel_for(ring.name, kernel, work.request())
    layout = Layout(work.tokens, ring.size, ring.rank)
    q, k, v, dout = work.inputs(layout.local_length, 0)
    call = Call(q, k, v, Plan.of(ring, layout, work.mask(layout)), work.params(), RingOptions(chosen))
    traffic = call.transport()

    def once() -> None:
        out, lse = forward(call, traffic, KERNELS[chosen])
        gradients(call, Results(out, lse, dout), traffic, KERNELS[chosen])

    once()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(CALLS):
        once()
    profile.disable()
    return pstats.Stats(profile)


def first_call(work: Workload, ring: Ring, kernel: str) -> float:
    """Seconds of a ring's first forward and backward in this process, with imports and compilation."""
    began = time.perf_counter()
    chosen = kernel_for(ring.name, kernel, work.request())
    contenders.in_ring(work, ring, chosen, RingOptions(chosen)).both.run()
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="of the whole row")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="of queries, and of keys and values")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--profile", action="store_true", help="also the Python functions of the first length")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    given = parser.parse_args()
    with world(given.device) as (ring, device):
        heads, kv_heads = given.heads
        works = [Workload(tokens, device, heads, kv_heads, given.width, given.width) for tokens in given.tokens]
        rows: list[dict[str, Any]] = [{"first_call_s": first_call(works[0], ring, given.kernel), "rank": ring.rank}]
        if ring.rank == 0:
            print(f"the first call took {rows[0]['first_call_s']:.1f} s", flush=True)
        for work in works:
            found = compared(work, ring, given.kernel, given.rounds)
            rows += found
            for row in found if ring.rank == 0 else ():
                words = f"host {row['host_ms']:7.3f} ms, GPU {row['gpu_ms']:7.3f} ms"
                print(f"{work.tokens:>9,} {row['contender']:18} {row['kernel']}: {words}", flush=True)
        if given.profile:
            stats = profiled(works[0], ring, given.kernel)
            if ring.rank == 0:
                stats.sort_stats("tottime").print_stats(40)
        if given.save and ring.rank == 0:
            results.save(given.save, f"host_{ring.size}", {**facts(), "calls": CALLS}, rows)


if __name__ == "__main__":
    main()
