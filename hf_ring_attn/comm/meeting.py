"""A meeting of ranks outside of their messages: did all of them come to a place, or did one fail alone?

A rank that failed inside a forward or a backward must not send what comes next: others may wait for the rest of it, and
would take the message for that. They match messages by order alone. So it asks the store of the process group.
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


def meet(ring: Ring, waits: bool = True) -> bool:
    """Comes to the next meeting of ``ring``; returns False if not all of its ranks come within `PATIENCE`.

    Args:
        waits: False for a rank that did not fail: others learn that it came, and it goes on.
    """
    if ring.size == 1:
        return True
    meetings, store = ring.state(_Meetings), distributed_c10d._get_process_group_store(ring.group)
    meetings.count += 1
    key = f"hf_ring_attn/meeting {meetings.count}"
    if store.add(f"{key}/came", 1) == ring.size:
        store.set(f"{key}/all", "1")
    try:
        if waits:
            store.wait([f"{key}/all"], PATIENCE)
    except RuntimeError:  # what a store raises after this time, or when its host has gone
        return False
    return True
