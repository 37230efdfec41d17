"""Tensors that wait in host memory, copied there and back on a stream beside the computation.

Copies of one device share a stream and a pool of page-locked buffers, which are used again from step to step. A tensor
leaves the GPU while the next one is computed; fetching one starts the copy of the one that was stored before it, which
a backward needs next. A tensor may have companions, which are fetched with it. On a CPU, whose memory is the host's,
copies are plain.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import ranks_of_machine
from ..errors import ChangedInPlace, HostMemoryFull, SavedAttentionChanged
from .free_memory import free_bytes

GRAIN = 1 << 21
"""Buffers are multiples of this many bytes (a huge page)."""
LEFT = 4 << 30
"""Bytes of host memory that stay free."""
THREADS = 8
"""At most so many threads of a rank touch new memory."""


class Buffers:
    """Page-locked buffers of host memory, bytes. torch's own allocator would round each up to a power of two.

    Whoever takes a buffer holds this object as well, so all are idle when it goes.

    Args:
        device: the GPU whose copies use them; None: the one in use.
    """

    def __init__(self, locked: bool, device: torch.device | None = None) -> None:
        self.locked, self.device = locked, device
        self.idle: list[Tensor] = []
        if locked:
            # The driver takes other pages at the address of pages that went while locked for those.
            weakref.finalize(self, unlock, self.idle, device).atexit = False

    def take(self, size: int) -> Tensor:
        """Returns the smallest idle buffer that holds ``size`` bytes; else makes one, in place of an idle one.

        Raises:
            HostMemoryFull: too little memory is free, or the driver locks no more.
        """
        fitting = [number for number, buffer in enumerate(self.idle) if len(buffer) >= size]
        if fitting:
            return self.idle.pop(min(fitting, key=lambda number: len(self.idle[number])))
        if self.idle:
            self.free([self.idle.pop()])
        return self.make(size)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Makes the buffers that are missing for tensors of so many bytes each, all at one time.

        Raises:
            HostMemoryFull: as `take`, for all that is missing.
        """
        idle, missing = sorted(map(len, self.idle)), 0
        for size in sorted(sizes, reverse=True):
            if idle and idle[-1] >= size:
                idle.pop()
            else:
                missing += self.rounded(size)
        self.check_room(max(0, missing - sum(idle)))
        taken: list[Tensor] = []
        try:
            for size in sorted(sizes, reverse=True):
                taken.append(self.take(size))
        finally:
            self.idle += taken

    def make(self, size: int) -> Tensor:
        """Makes a buffer of at least ``size`` bytes. Raises as `take`."""
        wanted = self.rounded(size)
        free = self.check_room(wanted, ranks_of_machine())
        if not self.locked:
            return torch.empty(wanted, dtype=torch.uint8, device="cpu")
        try:
            made, runtime = pages(wanted), torch.cuda.cudart()
        except OSError as error:  # a limit of this process (ulimit -v)
            raise HostMemoryFull(wanted, free or 0, f"The system said: {error}") from error
        touch(made)
        failed = runtime.cudaHostRegister(made.data_ptr(), wanted, 0)
        if int(failed) != 0:
            with suppress(RuntimeError):  # the runtime keeps the error until a launch asks for it: this one
                launch_nothing()
            raise HostMemoryFull(wanted, free or 0, f"The driver said: {runtime.cudaGetErrorString(failed)}")
        return made

    def check_room(self, wanted: int, ranks: int = 1) -> int | None:
        """Returns the bytes that are free, if locked memory can be made at all. Raises as `take`.

        Args:
            ranks: that make as much at the same time, and saw the same bytes free.
        """
        free = free_bytes() if self.locked and wanted else None
        if free is not None and free < wanted * ranks + LEFT:
            together = f"{ranks} ranks ask for as much at once, and " if ranks > 1 else ""
            raise HostMemoryFull(wanted, free, f"{together}{LEFT / 2**30:.1f} GiB stay free")
        return free

    def rounded(self, size: int) -> int:
        return -(-size // GRAIN) * GRAIN if self.locked else size

    def give(self, buffer: Tensor) -> None:
        """Takes back a buffer that is no longer used."""
        self.idle.append(buffer)

    def free(self, buffers: Sequence[Tensor]) -> None:
        if self.locked:
            unlock(buffers, self.device)

    def clear(self) -> None:
        """Gives all idle buffers back to the system."""
        gone = self.idle[:]
        del self.idle[: len(gone)]  # of the list itself: the finalizer has it
        self.free(gone)  # a tensor that goes meanwhile gives its buffer back


def unlock(buffers: Sequence[Tensor], device: torch.device | None) -> None:
    """Gives the driver's hold on page-locked buffers of ``device`` back."""
    if buffers:
        torch.cuda.synchronize(device)  # their last copies may be on their way
    for buffer in buffers:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def launch_nothing() -> None:
    """Launches a kernel without effect on the GPU in use."""
    torch.zeros(1, device="cuda")


class HostMemory:
    """The copies of one device.

    Attributes:
        leaving: tensors whose copies to the host may still run.
        stored: how many tensors were stored; fetched_early: how many were fetched before they were needed.
        full: why the latest tensor could not be stored, until someone reads it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.stream = None if self.module is None else self.module.Stream(device)
        self.buffers = Buffers(device.type == "cuda", device)
        self.leaving: deque[weakref.ref[Stored]] = deque()
        self.latest: weakref.ref[Stored] | None = None
        self.stored = self.fetched_early = 0
        self.full: HostMemoryFull | None = None

    def store(self, x: Tensor) -> Stored:
        """Copies ``x`` to the host. Its memory is free for others once the next tensor is stored, or on `settle`."""
        self.settle()
        before = None if self.latest is None else self.latest()
        copy = Stored(self, x, None if before is None else weakref.ref(before), ChangedInPlace)
        self.latest = weakref.ref(copy)
        return copy

    def current_stream(self) -> Any:
        """The computation's stream; None: it has none."""
        return None if self.module is None else self.module.current_stream(self.device)

    def settle(self) -> None:
        """Frees tensors that have left; the computation waits for their copies.

        Raises:
            ChangedInPlace, SavedAttentionChanged: one was changed meanwhile.
        """
        while self.leaving:
            copy = self.leaving.popleft()()
            if copy is not None:
                copy.settle()


Changed = type[ChangedInPlace] | type[SavedAttentionChanged]
"""The error for a tensor that was changed while it left."""


class _Copying(NamedTuple):
    """A copy on its way: the event at its end, its tensor on the device, and the stream that made that tensor."""

    event: Any
    tensor: Tensor
    owner: Any

    def end(self, stream: Any = None) -> Tensor:
        """The tensor; later work of ``stream`` waits for the copy. None: its owner, whose work gets its memory next."""
        if self.event is not None:
            (stream or self.owner).wait_event(self.event)
        return self.tensor


class Stored:
    """A tensor in host memory; freed with this object.

    Attributes:
        companions: tensors that are fetched with it.
        leaving: the copy to the host, and the tensor's version, until `settle`. fetched: the copy to the device.
    """

    def __init__(self, memory: HostMemory, x: Tensor, before: weakref.ref[Stored] | None, changed: Changed) -> None:
        self.memory, self.before, self.changed = memory, before, changed
        self.shape, self.dtype = x.shape, x.dtype
        self.companions: list[weakref.ref[Stored]] = []
        self.fetched: _Copying | None = None
        self.leaving: tuple[_Copying, int] | None = None
        self.buffer = memory.buffers.take(x.nbytes)
        x = x.detach()
        self.leaving = self._copied(self._values(), x, x), x._version
        memory.leaving.append(weakref.ref(self))
        memory.stored += 1

    def store_beside(self, x: Tensor) -> Stored:
        """Copies ``x``, this layer's attention output, to the host. Fetching the layer's input also starts fetching it.

        Its memory is free for others as that of `HostMemory.store`. Call `HostMemory.settle` before.
        """
        copy = Stored(self.memory, x, None, SavedAttentionChanged)
        self.companions.append(weakref.ref(copy))
        return copy

    def settle(self) -> None:
        """Frees the tensor that it is a copy of. Raises as `HostMemory.settle`."""
        if self.leaving is not None:
            (copying, version), self.leaving = self.leaving, None
            tensor = copying.end()
            if tensor._version != version:
                raise self.changed(tuple(tensor.shape))

    def fetch(self) -> Tensor:
        """The tensor on its device; starts the copies of its companions, and of the one that was stored before it."""
        self.start()
        assert self.fetched is not None, "started"
        found = self.fetched.end(self.memory.current_stream())
        self.fetched = None
        self.memory.settle()
        before = None if self.before is None else self.before()
        if before is not None:
            self.memory.fetched_early += before.start()
        return found

    def start(self) -> int:
        """Starts the copies of this tensor and its companions to the device; returns how many it started."""
        companions = [copy for reference in self.companions if (copy := reference()) is not None]
        waiting = [copy for copy in (self, *companions) if copy.fetched is None]
        for copy in waiting:
            copy._start()
        return len(waiting)

    def _start(self) -> None:
        # Made on the computation's stream, whose later work may use its memory again.
        found = torch.empty(self.shape, dtype=self.dtype, device=self.memory.device)
        self.fetched = self._copied(found, self._values(), found)

    def _values(self) -> Tensor:
        size = self.shape.numel() * self.dtype.itemsize
        return self.buffer[:size].view(self.dtype).view(self.shape)

    def _copied(self, to: Tensor, values: Tensor, on_device: Tensor) -> _Copying:
        """Starts a copy on the copies' stream, after all that the computation has asked for until now."""
        module, stream = self.memory.module, self.memory.stream
        if stream is None:
            to.copy_(values)
            return _Copying(None, on_device, None)
        owner = self.memory.current_stream()
        stream.wait_stream(owner)
        with module.stream(stream):
            to.copy_(values, non_blocking=True)
            return _Copying(stream.record_event(), on_device, owner)

    def __del__(self) -> None:
        if hasattr(self, "buffer"):  # else there was no memory for it
            for copying in (self.fetched, self.leaving and self.leaving[0]):
                if copying is not None:  # never used, or not settled: the copy must end before its memory's reuse
                    copying.end()
            self.memory.buffers.give(self.buffer)


_MEMORY: dict[torch.device, HostMemory] = {}
"""The host memory of each device."""


def host_memory(device: torch.device) -> HostMemory:
    """The host memory for tensors of ``device``."""
    if device not in _MEMORY:
        _MEMORY[device] = HostMemory(device)
    return _MEMORY[device]


def make_room(size: int) -> None:
    """Gives idle buffers back to the system if host memory cannot hold ``size`` bytes more."""
    free = free_bytes()
    if free is not None and free < size + LEFT:
        for memory in _MEMORY.values():
            memory.buffers.clear()


def pages(size: int) -> Tensor:
    """Makes [size] bytes of pages that a forked process (a loader's worker) does not get: it would copy them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel without it
                memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)


def touch(memory: Tensor) -> None:
    """Writes zeros to all of ``memory``, by several threads: the driver takes longer over pages that nobody touched.

    Source: recipes/results/2026-11-26-two-h100-256k.
    """
    shares = memory.chunk(touching_threads())
    with suppress(RuntimeError), ThreadPoolExecutor(len(shares)) as pool:  # no more threads can start
        list(pool.map(Tensor.zero_, shares))


def touching_threads() -> int:
    """This rank's share of the processors that it may use, at most `THREADS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(THREADS, cores // ranks_of_machine()))
