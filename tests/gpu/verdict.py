"""How a program of several ranks ends."""

from __future__ import annotations

import sys

import torch.distributed as dist

from hf_ring_attn.comm.ring import Ring


def told(ring: Ring, wrong: list[str], tried: str) -> bool:
    """The first rank writes what went wrong on any, and "``tried``, N wrong". Whether anything did. A collective."""
    texts: list[list[str]] = [[]] * ring.size
    dist.all_gather_object(texts, wrong)
    lines = [f"rank {rank}: {line}" for rank, some in enumerate(texts) for line in some]
    if ring.rank == 0:
        sys.stdout.write("\n".join([*lines, f"{tried}, {len(lines)} wrong"]) + "\n")
    return bool(lines)
