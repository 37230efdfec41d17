"""Process groups by names that are given once, and state of ours that lives as long as a group.

torch gives the name of a destroyed group to the next one in the same process (in notebooks, test suites, workers that
form a new world). The new group may have other ranks, which know nothing of what the old ones agreed on.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
import weakref
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..errors import ForkedProcess, GroupDestroyed

S = TypeVar("S")


# Weak, since gloo's threads end with their group, and must before the process does.
_NAMES: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
_GROUPS: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()
_STATES: dict[str, dict[type, Any]] = {}
_given: set[str] = set()
_inherited: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""In a process that was forked from a rank: the groups of the rank."""

# A program's fork needs this before the package knows of a ring.
os.register_at_fork(after_in_child=lambda: _inherited.update(distributed_c10d._world.pg_map))


def name_of(group: dist.ProcessGroup) -> str:
    """A name that this process gives to no other group: torch's, with a number where torch gives it again.

    Raises:
        ForkedProcess.
    """
    if group in _inherited:
        raise ForkedProcess
    name = _NAMES.get(group)
    if name is None:
        torchs = group.group_name
        names = itertools.chain([torchs], (f"{torchs} ({number})" for number in itertools.count(2)))
        name = _NAMES[group] = next(one for one in names if one not in _given)
        _given.add(name)
        _GROUPS[name] = group
        # Not as soon as a group ends: freeing buffers would wait for copies of a rank that failed.
        for old in [old for old in _STATES if not _is_alive(_GROUPS.get(old))]:
            del _STATES[old]
        if "gloo" in dist.get_backend_config(group):
            _leave_gloo_in_order()
    return name


def group_of(name: str) -> dist.ProcessGroup:
    """The group that got this name.

    Raises:
        GroupDestroyed; ForkedProcess.
    """
    group = _GROUPS.get(name)
    if group in _inherited:
        raise ForkedProcess
    if group is None or not _is_alive(group):
        raise GroupDestroyed(name)
    return group


def is_alive(name: str) -> bool:
    """Returns False if the group that got this name was destroyed."""
    return _is_alive(_GROUPS.get(name))


def state_of(name: str, kind: type[S]) -> S:
    """A feature's own state of a group: an instance of its class, made at first use. It must not hold the group.

    Raises:
        GroupDestroyed.
    """
    group_of(name)
    return state_in(_STATES.setdefault(name, {}), kind)


def state_in(states: dict[Any, Any], kind: type[S]) -> S:
    """The instance of a class among ``states``, made at first use."""
    found: S | None = states.get(kind)
    if found is None:
        found = states[kind] = kind()
    return found


def any_ring() -> bool:
    """Returns True if this process made a ring of several ranks whose group is alive."""
    return any(_is_alive(group) for group in _GROUPS.values())


def _is_alive(group: dist.ProcessGroup | None) -> bool:
    """Returns False for a destroyed group, which a program may still hold."""
    return group is not None and group in distributed_c10d._world.pg_map


@cache
def _leave_gloo_in_order() -> None:
    """Destroys gloo's groups at exit, and gives their threads time to free their last tensors.

    Such a thread needs the interpreter's lock. If it asks for it while the interpreter ends, C++ aborts the process:
    "terminate called without an active exception" (torch 2.13, seen in 3 of 40 processes).
    """

    def leave() -> None:
        if dist.is_initialized() and not _inherited:
            dist.destroy_process_group()
        time.sleep(0.1)

    atexit.register(leave)


def send_to_all(tensor: Tensor, rank: int) -> None:
    """Writes the tensor of one rank of the job into those of the others."""
    sent = tensor.detach().contiguous()
    dist.broadcast(sent, rank)
    tensor.detach().copy_(sent)
