"""A meeting of ranks outside of their messages: did all of them come to a place, or did one fail alone?

A rank that failed inside a forward must not send what comes next: others may wait for the rest of that forward, and
would take the message for it. They match messages by order alone. So it asks the store of the process group.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import distributed_c10d

from .ring import Ring

PATIENCE = timedelta(seconds=60)
"""How long a rank that failed waits for the others: they fail at the same place, but may compile kernels before."""


class _Meetings:
    """How often this rank came to a meeting of a ring."""

    count = 0


def come(ring: Ring) -> str:
    """Notes that this rank came to the next meeting of ``ring``; returns the meeting's key."""
    if ring.size == 1:
        return ""
    meetings = ring.state(_Meetings)
    meetings.count += 1
    key = f"hf_ring_attn/meeting {meetings.count}"
    store = distributed_c10d._get_process_group_store(ring.group)
    if store.add(f"{key}/came", 1) == ring.size:
        store.set(f"{key}/all", "1")
    return key


def all_come(ring: Ring) -> bool:
    """Comes to the next meeting of ``ring``, and returns True if all ranks do within `PATIENCE`."""
    key = come(ring)
    if ring.size == 1:
        return True
    try:
        distributed_c10d._get_process_group_store(ring.group).wait([f"{key}/all"], PATIENCE)
    except RuntimeError:  # what a store raises after this time, or when its host has gone
        return False
    return True
