"""The ranks of a benchmark: those that a launcher started, or this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..comm import Ring
from ..config import is_a_launched_rank


@contextmanager
def world(device: str | None) -> Iterator[tuple[Ring, torch.device]]:
    """The ring of all ranks that a launcher started, or of this process, and this rank's device."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not is_a_launched_rank():
        yield Ring.of(None), torch.device(kind)
        return
    mine = torch.device(kind)
    if kind == "cuda":
        mine = torch.device(kind, dist.get_node_local_rank())
        torch.cuda.set_device(mine)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=mine if kind == "cuda" else None)
    try:
        yield Ring.of(None), mine
    finally:
        dist.destroy_process_group()
