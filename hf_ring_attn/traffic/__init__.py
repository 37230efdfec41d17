"""Transports between the ranks of a ring, and the choice of one."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..comm.ring import Ring
from ..errors import CapturedGraph, NoPulls, RefusedElsewhere
from .base import Gather, RingStep, Sums, Traffic, head_halves, visiting_order
from .gathered_kv import ComparedKV, GatheredKV, LayerRole, gathered_kv_for
from .head_groups import ring_pass_groups, ring_pass_halves, seen_by_heads
from .interrupted import interruption_guard
from .messages import Messages

if TYPE_CHECKING:
    from .pulls import Pulls

__all__ = [
    "ComparedKV", "Gather", "GatheredKV", "LayerRole", "Messages", "RingStep", "Sums", "Traffic", "buffer_bytes",
    "gathered_kv_for", "head_halves", "interruption_guard", "ring_pass_groups", "ring_pass_halves", "seen_by_heads",
    "traffic_of", "transport_name", "visiting_order",
]  # fmt: skip


class _PullsByDevice(dict[torch.device, "Pulls | str"]):
    """A ring's P2P transports, or the reasons why it has none."""


def traffic_of(ring: Ring, device: torch.device, transport: str = "auto") -> Traffic:
    """Returns a ring's transport; ``transport`` as in `RingConfig.traffic`. The first choice of one is a collective.

    Raises:
        NoPulls: on every rank, if P2P copies were requested by name and are not possible.
        CapturedGraph: a ring of several ranks in a CUDA graph, with any transport.
    """
    if ring.size > 1 and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CapturedGraph(ring.size)
    if ring.size == 1 or transport == "messages" or (transport == "auto" and device.type != "cuda"):
        return Messages(ring)
    known = ring.state(_PullsByDevice)
    found = known.get(device)
    if found is None:
        found = known[device] = _pulls(ring, device)
    if not isinstance(found, str):
        return found
    if transport == "pulls":
        raise NoPulls(found)
    return Messages(ring)


def transport_name(ring: Ring, transport: str) -> str:
    """Returns the name of the transport that a ring's attention used; no communication."""
    return "pulls" if _pulls_of(ring) and transport != "messages" else "messages"


def buffer_bytes(ring: Ring) -> int:
    """Returns the bytes of a ring's P2P buffers on this rank; torch does not count them as allocated."""
    return sum(pulls.bytes for pulls in _pulls_of(ring))


def _pulls_of(ring: Ring) -> list[Pulls]:
    found = ring.state(_PullsByDevice).values() if ring.size > 1 else ()
    return [pulls for pulls in found if not isinstance(pulls, str)]


def _pulls(ring: Ring, device: torch.device) -> Pulls | str:
    """Sets up P2P copies if every rank can read every other's memory; else returns the reason, alike on all ranks."""
    from .pulls import Pulls, Shared  # only here: without GPUs nobody pays for its imports

    here = device.type == "cuda" and torch.version.hip is None
    again = ring.name != ring.group.group_name
    facts = torch.tensor([_machine(), int(here), Shared.made, int(again)], device=ring.small_device(device))
    table = ring.gather(facts, "compared machines").wait()[0].tolist()
    machines, able, made, named_again = zip(*table, strict=True)
    if not all(able):
        return "every rank needs an NVIDIA GPU"
    if len(set(machines)) > 1:
        return "the ranks are on several machines"
    if any(named_again):
        return "its process group has the name of a destroyed one, whose ranks torch's symmetric memory remembers"
    if len(set(made)) > 1:
        return f"its ranks made {list(made)} buffers, since some are in another ring too (pytorch issue 196082)"
    reason = ""
    try:
        pulls = Pulls(ring, device)
        pulls.try_out()
    except (RuntimeError, RefusedElsewhere) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    failed = torch.tensor([int(bool(reason))], device=ring.small_device(device))
    if bool(ring.gather(failed, "tried to read each other's memory").wait()[0].any()):
        return f"a rank's memory cannot be read by the others ({reason or 'another rank says why'})"
    return pulls


def _machine() -> int:
    """Returns a number that all ranks of one running machine share."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return zlib.crc32(boot.read_bytes()) if boot.exists() else zlib.crc32(b"")
