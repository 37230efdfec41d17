"""The ranks of a benchmark: those that a launcher started, or this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..comm.ring import Ring
from ..config import is_a_launched_rank

OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's leave for ranks on one GPU to read each other's memory."""


def ranks_per_gpu() -> int:
    """How many ranks of this machine share a GPU, where more were started than it has; else 1."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return -(-ranks // max(1, torch.cuda.device_count()))


@contextmanager
def world(device: str | None, may_share: bool = False) -> Iterator[tuple[Ring, torch.device]]:
    """The ring of all ranks that a launcher started, or of this process, and this rank's device.

    Args:
        device: "cuda" or "cpu"; None: a GPU if there is one.
        may_share: whether ranks may share GPUs, where more were started. By pulls they do all that they do on GPUs of
            their own, but not as fast. NCCL refuses them, so what else they tell each other travels by gloo, which has
            no messages between GPUs: there is no other road.

    Raises:
        SystemExit: in words, if ranks would share a GPU and may not.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not is_a_launched_rank():
        yield Ring.of(None), torch.device(kind)
        return
    mine, shared = torch.device(kind), kind == "cuda" and ranks_per_gpu() > 1
    if shared and not may_share:
        raise SystemExit("ranks that share a GPU have no speed to tell: start one rank on each")
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
