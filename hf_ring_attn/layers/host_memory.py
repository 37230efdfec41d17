"""Tensors that wait in host memory, copied there and back on a stream beside the computation.

Copies of one device share a stream and a pool of page-locked buffers, which are used again from step to step. A tensor
leaves the GPU while the next one is computed; fetching one starts the copy of the one that was stored before it, which
a backward needs next. On a CPU, whose memory is the host's, copies are plain.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..errors import ChangedInPlace, HostMemoryFull

GRAIN = 1 << 21
"""Buffers are multiples of this many bytes (a huge page)."""
LEFT = 4 << 30
"""Bytes of host memory that stay free."""


class Buffers:
    """Page-locked buffers of host memory, bytes. torch's own allocator would round each up to a power of two."""

    def __init__(self, locked: bool) -> None:
        self.locked = locked
        self.idle: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """Returns the smallest idle buffer that holds ``size`` bytes; else makes one, in place of an idle one.

        Raises:
            HostMemoryFull: too little memory is free, or the driver locks no more.
        """
        fitting = [buffer for buffer in self.idle if len(buffer) >= size]
        if fitting:
            found = min(fitting, key=len)
            self.idle = [buffer for buffer in self.idle if buffer is not found]
            return found
        if self.idle:
            self.free(self.idle.pop())
        wanted = -(-size // GRAIN) * GRAIN if self.locked else size
        free = free_bytes() if self.locked else None
        if free is not None and free < wanted + LEFT:
            raise HostMemoryFull(wanted, free)
        if not self.locked:
            return torch.empty(wanted, dtype=torch.uint8, device="cpu")
        made = pages(wanted)
        if int(torch.cuda.cudart().cudaHostRegister(made.data_ptr(), wanted, 0)) != 0:
            raise HostMemoryFull(wanted, free or 0)
        return made

    def give(self, buffer: Tensor) -> None:
        """Takes back a buffer that is no longer used."""
        self.idle.append(buffer)

    def free(self, buffer: Tensor) -> None:
        if self.locked:
            torch.cuda.synchronize()  # its last copy may be on its way
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


class HostMemory:
    """The copies of one device.

    Attributes:
        leaving: tensors whose copies to the host may still run, with the event at their end and their versions.
        stored: how many tensors were stored; fetched_early: how many were fetched before they were needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.stream = None if self.module is None else self.module.Stream(device)
        self.buffers = Buffers(locked=device.type == "cuda")
        self.leaving: deque[tuple[Any, Tensor, int]] = deque()
        self.latest: weakref.ref[Stored] | None = None
        self.stored = self.fetched_early = 0

    def store(self, x: Tensor) -> Stored:
        """Copies ``x`` to the host. Its memory is free for others once the next tensor is stored, or on `settle`."""
        self.settle()
        before = None if self.latest is None else self.latest()
        copy = Stored(self, x, None if before is None else weakref.ref(before))
        self.latest = weakref.ref(copy)
        self.stored += 1
        return copy

    def settle(self) -> None:
        """Frees tensors that have left; the computation waits for their copies.

        Raises:
            ChangedInPlace: one was changed meanwhile.
        """
        while self.leaving:
            event, tensor, version = self.leaving.popleft()
            if event is not None:
                self.module.current_stream(self.device).wait_event(event)
            if tensor._version != version:
                raise ChangedInPlace(tuple(tensor.shape))


class Stored:
    """A tensor in host memory; freed with this object."""

    def __init__(self, memory: HostMemory, x: Tensor, before: weakref.ref[Stored] | None) -> None:
        self.memory, self.before = memory, before
        self.shape, self.dtype = x.shape, x.dtype
        self.buffer = memory.buffers.take(x.nbytes)
        self.fetched: tuple[Any, Tensor] | None = None
        values, x, event = self._values(), x.detach(), None
        if memory.stream is None:
            values.copy_(x)
        else:
            with self._beside(memory.stream):
                values.copy_(x, non_blocking=True)
                event = memory.stream.record_event()
        memory.leaving.append((event, x, x._version))

    def fetch(self) -> Tensor:
        """The tensor on its device; starts the copy of the one that was stored before it."""
        if self.fetched is None:
            self._start()
        assert self.fetched is not None, "started"
        event, found = self.fetched
        self.fetched = None
        if event is not None:
            self.memory.module.current_stream(self.memory.device).wait_event(event)
        self.memory.settle()
        before = None if self.before is None else self.before()
        if before is not None and before.fetched is None:
            before._start()
            self.memory.fetched_early += 1
        return found

    def _start(self) -> None:
        # Made on the computation's stream, whose later work may use its memory again.
        found = torch.empty(self.shape, dtype=self.dtype, device=self.memory.device)
        event = None
        stream = self.memory.stream
        if stream is None:
            found.copy_(self._values())
        else:
            with self._beside(stream):
                found.copy_(self._values(), non_blocking=True)
                event = stream.record_event()
        self.fetched = (event, found)

    def _values(self) -> Tensor:
        size = self.shape.numel() * self.dtype.itemsize
        return self.buffer[:size].view(self.dtype).view(self.shape)

    def _beside(self, stream: Any) -> Any:
        """The context of the copies' stream, after all that the computation has asked for until now."""
        stream.wait_stream(self.memory.module.current_stream(self.memory.device))
        return self.memory.module.stream(stream)

    def __del__(self) -> None:
        if hasattr(self, "buffer"):  # else there was no memory for it
            if (
                self.fetched is not None and self.fetched[0] is not None
            ):  # never used: the copy must end before its reuse
                self.memory.module.current_stream(self.memory.device).wait_event(self.fetched[0])
            self.memory.buffers.give(self.buffer)


_MEMORY: dict[torch.device, HostMemory] = {}
"""The host memory of each device."""


def host_memory(device: torch.device) -> HostMemory:
    """The host memory for tensors of ``device``."""
    if device not in _MEMORY:
        _MEMORY[device] = HostMemory(device)
    return _MEMORY[device]


def pages(size: int) -> Tensor:
    """Makes [size] bytes of pages that a forked process (a loader's worker) does not get: it would copy them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel without it
                memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)


def free_bytes() -> int | None:
    """Bytes of memory that this machine, or this process's control group, can still give; None: unknown."""
    machine = _table("/proc/meminfo").get("MemAvailable:")
    found = [] if machine is None else [machine * 1024]
    limit, used = (_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].strip().isdigit():
        cached = _table("/sys/fs/cgroup/memory.stat").get("inactive_file", 0)
        found.append(int(limit[0]) - int(used[0]) + cached)
    return min(found, default=None)


def _table(file: str) -> dict[str, int]:
    """The numbers of a file of lines "name number ..."."""
    return {words[0]: int(words[1]) for line in _lines(file) if len(words := line.split()) > 1 and words[1].isdigit()}


def _lines(file: str) -> list[str]:
    try:
        with open(file) as lines:
            return lines.readlines()
    except OSError:
        return []
