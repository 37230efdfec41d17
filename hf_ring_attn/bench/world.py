"""The ranks of a command: those of a launcher, those that it starts, or this process alone."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..comm.ring import Ring
from ..config import is_a_launched_rank

OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Environment variable that lets ranks on one GPU read each other's memory."""

GRACE_SECONDS = 30.0
"""How long the other ranks may run on after one ended in an error: they end in the same one."""


def ranks_per_gpu() -> int:
    """The number of ranks per GPU of this machine if it has fewer GPUs than ranks; else 1."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return -(-ranks // max(1, torch.cuda.device_count()))


@contextmanager
def world(device: str | None, may_share: bool = False) -> Iterator[tuple[Ring, torch.device]]:
    """Yields the ring of all launched ranks, or of this process alone, and this rank's device.

    Args:
        device: "cuda" or "cpu"; None: a GPU if there is one.
        may_share: allow several ranks per GPU. P2P copies work there, but slower. NCCL refuses such ranks, and gloo,
            which serves the collectives, has no send/recv between GPUs: P2P copies are the only transport.

    Raises:
        SystemExit: ranks would share a GPU and may not.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not is_a_launched_rank():
        yield Ring.of(None), torch.device(kind)
        return
    mine, shared = torch.device(kind), kind == "cuda" and ranks_per_gpu() > 1
    if shared and not may_share:
        raise SystemExit("the speed of ranks that share a GPU is meaningless: start one rank per GPU")
    if kind == "cuda":
        mine = torch.device(kind, dist.get_node_local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(mine)
    if shared:
        os.environ[OVERLAP] = "1"
    nccl = kind == "cuda" and not shared
    dist.init_process_group("nccl" if nccl else "gloo", device_id=mine if nccl else None)
    try:
        yield Ring.of(None), mine
    finally:
        dist.destroy_process_group()


def start_ranks(count: int, arguments: Sequence[str], seconds: float = math.inf) -> int:
    """Runs ``python -m hf_ring_attn ARGUMENTS`` as ``count`` ranks on this machine; returns the first exit code but 0.

    Only rank 0 prints. If one rank ends in an error, or after so many seconds, the others are ended; the exit code of
    a rank that was ended is negative.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "hf_ring_attn", *arguments],
            env={**os.environ, **{name: str(x) for name, x in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}},
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(count)
    ]
    try:
        end = time.monotonic() + seconds
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        deadline = min(end, time.monotonic() + GRACE_SECONDS)
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    return next((code for code in (rank.wait() for rank in ranks) if code), 0)
