"""How fast a process locks host memory, as it does in the first step that offloads checkpoints.

    python recipes/benchmarks/host_lock.py [--gib 8] [--threads 0 1 4 16] [--processes 2] [--save FOLDER]

Each buffer's pages are touched by so many threads, then locked; with 0 threads the driver touches them while it locks
them. The package takes up to 8 threads. What was locked stays until the end, so each way has other pages. Those that a
virtual machine used before are faster, so give a number of threads twice. On a CPU nothing is locked, and only touching
is timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hf_ring_attn.bench import results
from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.layers.host_memory import pages

BUFFER = 1 << 30
_KEPT: list[torch.Tensor] = []


def seconds(gib: int, threads: int) -> tuple[float, float]:
    """Seconds to touch, and to lock, ``gib`` buffers of 1 GiB."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.init()
    made = [pages(BUFFER) for _ in range(gib)]
    _KEPT.extend(made)
    began = time.perf_counter()
    if threads:
        with ThreadPoolExecutor(threads) as pool:
            for buffer in made:
                list(pool.map(torch.Tensor.zero_, buffer.chunk(threads)))
    touched = time.perf_counter()
    if on_gpu:
        for buffer in made:
            failed = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), BUFFER, 0)
            assert int(failed) == 0, failed
    locked = time.perf_counter()
    return touched - began, locked - touched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=2, help="of each process and way")
    parser.add_argument("--threads", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--processes", type=int, default=1, help="at a time, as the ranks of a node")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    given = parser.parse_args()
    head, rows = facts(), []
    print(f"{'threads':>7} {'touch s':>9} {'lock s':>9} {'GiB/s a process':>16}")
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for threads in given.threads:
            found: list[Any] = pool.starmap(seconds, [(given.gib, threads)] * given.processes)
            touch, lock = (max(each[part] for each in found) for part in (0, 1))
            rate = given.gib / (touch + lock) if touch + lock else 0.0
            print(f"{threads:7d} {touch:9.2f} {lock:9.2f} {rate:16.2f}", flush=True)
            rows.append({"threads": threads, "gib": given.gib, "processes": given.processes, "seconds": found})
    if given.save is not None:
        results.save(given.save, "host_lock", head, rows)


if __name__ == "__main__":
    main()
