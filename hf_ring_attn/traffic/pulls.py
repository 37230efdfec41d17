"""Transport by P2P copies: each rank reads the others' memory over NVLink with the copy engines.

torch's symmetric memory makes a buffer of each rank readable by all. At the message sizes of a ring step, NCCL's
send/recv reaches less than half of a link's speed, costs the host ten times as much to launch, and takes
multiprocessors from the attention it overlaps with (recipes/results/2026-11-21-pulls); a copy does not.

Synchronization:

- Ops alternate between two buffers of keys and values. Each op writes, waits at a barrier, then reads. The next op's
  barrier means that all ranks have finished reading, so the op after that may overwrite the buffer.
- Groups of heads, and head halves, may alternate between two streams (`two_streams`). Each waits for its own keys and
  accumulators, and both streams join at the end. Buffers belong to the stream that calls the op.
- Accumulators of a head half are sent through an outbox. READY signals to the next rank that they are written, TAKEN
  to the previous rank that they are copied and its outbox may be overwritten.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from ..comm.ring import Ring
from ..errors import NoMemoryForBuffers, UnevenBuffers
from ..sharding.layout import chunks_of
from .base import PULLED, WHOLE, Gather, RingStep, Sums, visiting_order
from .gathered_kv import KVGroup
from .interrupted import interruption_guard
from .packing import Packing
from .two_streams import TwoStreams

LOST_AFTER_MS = 600_000
"""`Pulls.lost_after_ms` if a process group's timeout cannot be read; NCCL's default."""

BARRIER = 0
READY = 1
TAKEN = 3
"""Signal channels; READY and TAKEN use one per head half."""

ROUND = 2**21
"""Buffer sizes are multiples of this many bytes."""

PACKINGS = 32
"""Most buffer layouts that are cached; each row length makes another."""


class Shared:
    """A buffer of symmetric memory on every rank, readable by all. Creating one is a collective.

    Attributes:
        made: how many this process has made, in all rings. In torch before pytorch/pytorch#196350, ranks whose numbers
            differ would look for each other under different names, and wait until the time-out.
    """

    made = 0

    def __init__(self, ring: Ring, size: int, device: torch.device) -> None:
        self.size = size
        self.views: dict[Packing, tuple[list[list[tuple[Tensor, ...]]], list[tuple[slice, Tensor, Tensor]]]] = {}
        self.mine = _allocated_by_all(ring, size, device)
        self.handle: Any = symmetric_memory.rendezvous(self.mine, ring.group)
        Shared.made += 1
        self.of = [self.handle.get_buffer(rank, (size,), torch.uint8) for rank in range(ring.size)]


def _allocated_by_all(ring: Ring, size: int, device: torch.device) -> Tensor:
    """`_allocated` on every rank, or an error on every rank: torch would wait for the one that has no memory.

    Raises:
        NoMemoryForBuffers, or what the driver says: this rank's GPU has no such memory.
        RefusedElsewhere: another rank's has none.
    """
    mine: Tensor | None = None
    failure: Exception | None = None
    try:
        mine = _allocated(size, device)
    except Exception as error:  # noqa: BLE001  raised below; else the others would wait
        failure = error
    ring.agree({}, ring.small_device(device), failure=failure, doing="allocated its buffers")
    assert mine is not None
    return mine


def _allocated(size: int, device: torch.device) -> Tensor:
    """Symmetric memory of ``size`` bytes.

    It comes from the driver, past torch's caching allocator. Where that one holds the GPU's memory without using it,
    it gives it back first.

    Raises:
        NoMemoryForBuffers: the GPU has no such memory.
    """
    try:
        return symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
    torch.cuda.synchronize(device)  # memory of a side stream is free when its work is done
    torch.cuda.empty_cache()
    try:
        return symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        free, total = torch.cuda.mem_get_info(device)
        raise NoMemoryForBuffers(size, free, total) from error


class Pulls:
    """Implements `Traffic` with P2P copies. One per ring and device, since its ops alternate between two buffers.

    Attributes:
        lost_after_ms: timeout of a wait for another rank; it ends with a CUDA error.
        held: tensors that queued copies use. After an error in an op the copies are still queued, so freeing their
            memory would let them overwrite other tensors: it stays until the ring's process group was destroyed.
    """

    groups, bytes_per_gather, whole_below = 2, PULLED, WHOLE

    def __init__(self, ring: Ring, device: torch.device) -> None:
        self.ring = ring
        self.device = device
        self.other_stream: Any = torch.cuda.Stream(device)
        # High priority: a signal waits for one attention block at most.
        self.keys_stream: Any = torch.cuda.Stream(device, priority=-1)
        self.sums_stream: Any = torch.cuda.Stream(device, priority=-1)
        self.ops = itertools.count()
        self.guard = interruption_guard(ring)
        self.lost_after_ms = _lost_after_ms(ring, device)
        self.held: dict[object, object] = {}
        self.keys: list[Shared] = []
        self.outboxes: Shared | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the buffers: two of keys and values, and one of accumulators, sized for the largest op so far."""
        return sum(shared.size for shared in self.keys) + (self.outboxes.size if self.outboxes is not None else 0)

    def try_out(self) -> None:
        """Reads a byte of every other rank. A collective.

        Raises:
            RuntimeError: a rank's memory cannot be read.
        """
        shared = Shared(self.ring, ROUND, self.device)
        shared.mine.fill_(self.ring.rank)
        shared.handle.barrier(BARRIER, self.lost_after_ms)
        seen = [int(x[-1]) for x in shared.of]
        shared.handle.barrier(BARRIER, self.lost_after_ms)
        if seen != list(range(self.ring.size)):
            raise RuntimeError(f"wrong bytes from the other ranks: {seen}")

    # ---- keys and values -------------------------------------------------------------------------------------------

    def gathered(self, request: Gather) -> Generator[KVGroup]:
        k, v, groups, owners, keep, two_streams = request
        size = self.ring.size
        held = chunks_of(size, owners)
        packing = Packing.of(k, v, groups, len(held[0]))
        slots = len(groups) if keep else min(2, len(groups))
        rows = [packing.empty(k, number, size) for number in range(slots)]  # the first are the largest
        shared = self._publish(k, v, packing)
        self.held["rows"] = rows
        order = [(self.ring.rank + step) % size for step in range(size)]  # each rank reads from a different one
        read: list[Any] = []

        def pull(number: int) -> tuple[Tensor, Any]:
            row = packing.within(rows[number % slots], number, size)
            if number >= slots:
                self.keys_stream.wait_event(read[number - slots])
            with torch.cuda.stream(self.keys_stream):
                packing.lay_down(row, shared[number], order, held)
                return row, self._event(self.keys_stream)

        def arriving(ahead: tuple[Tensor, Any]) -> Generator[KVGroup]:
            with self._streams(two_streams and len(groups) > 1) as streams:
                for number, group in enumerate(groups):
                    at = streams.turn(number)
                    row, arrived = ahead
                    if number + 1 < len(groups):
                        ahead = pull(number + 1)
                    with at:
                        self._compute().wait_event(arrived)
                    yield KVGroup(group, *packing.apart(row, number), at)
                    if number + slots < len(groups):  # a later group will be pulled to its memory
                        with at:
                            read.append(self._event(self._compute()))
            self._end()

        return arriving(pull(0))

    def _publish(self, k: Tensor, v: Tensor, packing: Packing) -> list[list[tuple[Tensor, ...]]]:
        """Writes keys and values to the shared buffer. Returns views of every rank's, readable on `keys_stream`."""
        self.guard.check()
        self._grow_buffers(packing.stops[-1], 0)  # without memory every rank ends here, before it sends anything
        self.guard.begin()
        shared = self.keys[next(self.ops) % 2]
        if packing not in shared.views:
            if len(shared.views) >= PACKINGS:
                shared.views.clear()
            with torch.inference_mode(False):  # else training could not write to views that an evaluation made
                shared.views[packing] = packing.views(shared.of), packing.places(shared.mine)
        read, written = shared.views[packing]
        # The previous op may have run on another stream; on the same one this waits for nothing.
        self._compute().wait_stream(self.keys_stream)
        packing.write(written, k, v)
        self.keys_stream.wait_stream(self._compute())
        with torch.cuda.stream(self.keys_stream):
            shared.handle.barrier(BARRIER, self.lost_after_ms)
        return read

    def _end(self) -> None:
        self.held.clear()
        self.guard.end()

    # ---- the ring --------------------------------------------------------------------------------------------------

    def ring_pass(
        self, k: Tensor, v: Tensor, halves: list[slice], new: Callable[[int, slice], Sums], two_streams: bool = False
    ) -> Generator[RingStep]:
        *others, own = visiting_order(self.ring)
        packing = Packing.of(k, v, halves)
        slots = min(2, len(others))
        buffers = [[packing.empty(k, number, 1) for _ in range(slots)] for number in range(len(halves))]
        shared = self._publish(k, v, packing)
        self.held["buffers"] = buffers
        read: dict[tuple[int, int], Any] = {}

        def pull(step: int, half: int) -> tuple[Tensor, Any]:
            if step >= 2:
                self.keys_stream.wait_event(read.pop((step - 2, half)))
            buffer = buffers[half][step % slots]
            with torch.cuda.stream(self.keys_stream):
                buffer.copy_(shared[half][others[step]][0])
                return buffer, self._event(self.keys_stream)

        keys = {(step, half): pull(step, half) for step in range(min(2, len(others))) for half in range(len(halves))}

        def steps() -> Generator[RingStep]:
            first = others[0] if others else own
            # A double buffer per half: accumulators to add to, and a receive buffer; they swap at each step.
            sums = [_with_receive_buffers(new(first, half)) for half in halves]
            self.held["sums"] = sums
            outbox_bytes = self._outbox_bytes(sums[0][0], len(halves)) if others else 0
            arrived: list[Any] = [None] * len(halves)
            with self._streams(two_streams and len(halves) > 1) as streams:
                turns = [(number, half, streams.turn(number)) for number, half in enumerate(halves)]
                for step, source in enumerate(others):
                    for number, half, at in turns:
                        buffer, keys_arrived = keys.pop((step, number))
                        here, there = sums[number][step % 2], sums[number][(step + 1) % 2]
                        with at:
                            self._wait_for(arrived[number])
                            self._wait_for(keys_arrived)
                        yield RingStep(source, half, *packing.apart(buffer, number), here, at)
                        with at:
                            read[step, number] = self._event(self._compute())
                            if step + 2 < len(others):
                                keys[step + 2, number] = pull(step + 2, number)
                            arrived[number] = self._moved_on(here, there, number, outbox_bytes, first=step == 0)
                for number, half, at in turns:
                    with at:
                        self._wait_for(arrived[number])
                    yield RingStep(own, half, k[:, :, half], v[:, :, half], sums[number][len(others) % 2], at)
            # TAKEN: the next rank has copied the last accumulators. Only the next op's first ones wait for it.
            with torch.cuda.stream(self.sums_stream):
                for number in range(len(halves)):
                    self._wait_for_signal(self._next, TAKEN + number)
            self._end()

        return steps()

    def _outbox_bytes(self, sums: Sums, halves: int) -> int:
        """Returns the outbox bytes per head half, from the accumulators of the first half, which has the most heads."""
        outbox_bytes = -(-sum(x.nbytes for x in sums) // ROUND) * ROUND
        self._grow_buffers(0, outbox_bytes * halves)
        return outbox_bytes

    def _moved_on(self, sums: Sums, arriving: Sums, half: int, outbox_bytes: int, first: bool) -> Any:
        """Sends accumulators on and receives those of the next keys; returns the event of their arrival."""
        size = sum(x.nbytes for x in sums)
        assert self.outboxes is not None and size <= outbox_bytes, "halves would write over each other's sums"
        box = slice(half * outbox_bytes, half * outbox_bytes + size)
        self.sums_stream.wait_stream(self._compute())
        with torch.cuda.stream(self.sums_stream):
            if not first:
                self._wait_for_signal(self._next, TAKEN + half)
            for into, x in zip(_like(self.outboxes.mine[box], sums), sums, strict=True):
                into.copy_(x)
            self.outboxes.handle.put_signal(self._next, READY + half, self.lost_after_ms)
            self._wait_for_signal(self._previous, READY + half)
            for into, x in zip(arriving, _like(self.outboxes.of[self._previous][box], sums), strict=True):
                into.copy_(x)
            self.outboxes.handle.put_signal(self._previous, TAKEN + half, self.lost_after_ms)
            return self._event(self.sums_stream)

    def _wait_for(self, event: Any) -> None:
        if event is not None:
            self._compute().wait_event(event)

    def _wait_for_signal(self, rank: int, channel: int) -> None:
        assert self.outboxes is not None
        self.outboxes.handle.wait_signal(rank, channel, self.lost_after_ms)

    # ---- small things ----------------------------------------------------------------------------------------------

    @property
    def _next(self) -> int:
        return (self.ring.rank + 1) % self.ring.size

    @property
    def _previous(self) -> int:
        return (self.ring.rank - 1) % self.ring.size

    def _streams(self, two_streams: bool) -> TwoStreams:
        return TwoStreams(self.other_stream if two_streams else None, self.device)

    def _compute(self) -> Any:
        return torch.cuda.current_stream(self.device.index)  # of a device, torch looks up the index at each call

    def _event(self, stream: Any) -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def _grow_buffers(self, keys: int, sums: int) -> None:
        """Allocates larger buffers if needed. Sizes are the same on every rank, so all ranks do this together."""
        if keys and (not self.keys or self.keys[0].size < keys):
            self._settle()
            self.keys = []
            size = -(-keys // ROUND) * ROUND
            self.keys = [Shared(self.ring, size, self.device) for _ in range(2)]
        if sums and (self.outboxes is None or self.outboxes.size < sums):
            self._settle()
            self.outboxes = None
            self.outboxes = Shared(self.ring, sums, self.device)

    def _settle(self) -> None:
        """Waits until no rank reads a buffer any more.

        Raises:
            UnevenBuffers: the ranks could not make new ones.
        """
        torch.cuda.synchronize(self.device)
        made = self.ring.numbers(Shared.made, self.ring.small_device(self.device), "grew its buffers")
        torch.cuda.synchronize(self.device)
        if len(set(made)) > 1:
            raise UnevenBuffers(made)


def _with_receive_buffers(sums: Sums) -> tuple[Sums, Sums]:
    first, second = sums
    return sums, (torch.empty_like(first), torch.empty_like(second))


def _like(flat: Tensor, sums: Sums) -> Sums:
    """Views bytes as two tensors like ``sums``."""
    first, second = sums
    one, other = flat.split([first.nbytes, second.nbytes])
    return one.view(first.dtype).view(first.shape), other.view(second.dtype).view(second.shape)


def _lost_after_ms(ring: Ring, device: torch.device) -> int:
    """Returns the timeout of the process group (ddp_timeout), so that P2P copies wait as long as NCCL does."""
    try:
        seconds = ring.group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # private in torch, and not every backend has it
        return LOST_AFTER_MS
    return max(1, math.ceil(seconds * 1000))  # 0 would mean no timeout
