"""The ranks of a benchmark: those of a launcher, or this process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..comm.ring import Ring
from ..config import is_a_launched_rank

OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Environment variable that lets ranks on one GPU read each other's memory."""


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
