"""Travel by pulls: each rank copies what it needs out of the others' memory, over NVLink, by the copy engines.

torch's symmetric memory makes a buffer of each rank readable by all. NCCL's point-to-point messages reach less than
half of a link's speed at the sizes of a ring's hops, cost the host ten times as much to launch, and take
multiprocessors from the attention that they are to hide behind (recipes/results/2026-11-21-pulls); a copy does not.

What keeps ranks from reading too early or writing too soon:

- Keys and values lie in one of two buffers, by turns from op to op. A barrier of each op follows the writing and
  comes before the reading; that of the next op says that everyone has finished reading this one's, so the buffer
  after next may be written again.
- Groups of heads, and lanes, may be attended on two streams by turns (`two_streams`); each waits for its own keys and
  sums, and both are joined at the end of a walk. What travels lies in memory of the stream that an op is called on.
- The sums of a lane lie in an outbox. READY says to the next rank that they are there, TAKEN to the one before that
  they have been copied, and the outbox may be written again.
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
from ..sharding.layout import Owners, chunks_of
from .base import PULLED, RingStep, Sums, visiting_order
from .gathered_kv import KVGroup
from .interrupted import interruption_guard
from .packing import Packing
from .two_streams import Abreast

LOST_AFTER_MS = 600_000
"""`Pulls.lost_after_ms` where torch does not tell a process group's timeout; NCCL's default."""

BARRIER = 0
READY = 1
TAKEN = 3
"""Channels of signals; the last two with one for each of two lanes."""

ROUND = 2**21
"""Sizes of buffers are multiples of this."""

PACKINGS = 32
"""So many ways of lying in a buffer are remembered: rows of other lengths make others."""


class Shared:
    """Bytes of every rank that all ranks can read. Making one is a collective."""

    def __init__(self, ring: Ring, size: int, device: torch.device) -> None:
        self.size = size
        self.views: dict[Packing, list[list[tuple[Tensor, ...]]]] = {}
        self.mine = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self.handle: Any = symmetric_memory.rendezvous(self.mine, ring.group)
        self.of = [self.handle.get_buffer(rank, (size,), torch.uint8) for rank in range(ring.size)]


class Pulls:
    """See the module and `Traffic`. One for each ring and device, since its buffers are used by turns.

    Attributes:
        lost_after_ms: a rank that waits longer for another one ends with an error of CUDA.
        held: what queued copies read and write. After an error in the middle of an op they are queued still, and
            whoever got their memory would be written over: it stays, until a process group of this name begins anew.
    """

    groups, bytes_per_gather = 2, PULLED

    def __init__(self, ring: Ring, device: torch.device) -> None:
        self.ring = ring
        self.device = device
        self.other_stream: Any = torch.cuda.Stream(device)
        # Before the attention's blocks in the queue: a signal waits for one of them at most.
        self.keys_stream: Any = torch.cuda.Stream(device, priority=-1)
        self.sums_stream: Any = torch.cuda.Stream(device, priority=-1)
        self.ops = itertools.count()
        self.halfway = interruption_guard(ring)
        self.lost_after_ms = _lost_after_ms(ring, device)
        self.held: dict[object, object] = {}
        self.keys: list[Shared] = []
        self.outboxes: Shared | None = None

    @property
    def bytes(self) -> int:
        """What the buffers take: two of this rank's keys and values, and one of their sums, at the largest op yet."""
        return sum(shared.size for shared in self.keys) + (self.outboxes.size if self.outboxes is not None else 0)

    def try_out(self) -> None:
        """A collective. Every rank reads a byte of every other.

        Raises:
            RuntimeError: where that cannot be.
        """
        shared = Shared(self.ring, ROUND, self.device)
        shared.mine.fill_(self.ring.rank)
        shared.handle.barrier(BARRIER, self.lost_after_ms)
        seen = [int(x[-1]) for x in shared.of]
        shared.handle.barrier(BARRIER, self.lost_after_ms)
        if seen != list(range(self.ring.size)):
            raise RuntimeError(f"wrong bytes from the other ranks: {seen}")

    # ---- keys and values -------------------------------------------------------------------------------------------

    def gathered(
        self,
        k: Tensor,
        v: Tensor,
        groups: list[slice],
        owners: Owners = (),
        keep: bool = False,
        two_streams: bool = False,
    ) -> Generator[KVGroup]:
        size = self.ring.size
        held = chunks_of(size, owners)
        packing = Packing.of(k, v, groups, len(held[0]))
        rooms = len(groups) if keep else min(2, len(groups))
        rows = [packing.empty(k, number, size) for number in range(rooms)]  # the first are the largest
        shared = self._publish(k, v, packing)
        self.held["rows"] = rows
        order = [(self.ring.rank + step) % size for step in range(size)]  # its own first, then each rank another one's
        read: list[Any] = []

        def pull(number: int) -> tuple[Tensor, Any]:
            row = packing.within(rows[number % rooms], number, size)
            if number >= rooms:
                self.keys_stream.wait_event(read[number - rooms])
            with torch.cuda.stream(self.keys_stream):
                packing.lay_down(row, shared[number], order, held)
                return row, self._event(self.keys_stream)

        def arriving(ahead: tuple[Tensor, Any]) -> Generator[KVGroup]:
            with self._streams(two_streams) as streams:
                for number, group in enumerate(groups):
                    at = streams.turn(number)
                    row, arrived = ahead
                    if number + 1 < len(groups):
                        ahead = pull(number + 1)
                    with at:
                        self._compute().wait_event(arrived)
                    yield KVGroup(group, *packing.apart(row, number), at)
                    with at:
                        read.append(self._event(self._compute()))
            self._end()

        return arriving(pull(0))

    def _publish(self, k: Tensor, v: Tensor, packing: Packing) -> list[list[tuple[Tensor, ...]]]:
        """Writes keys and values where all ranks can read them. Returns every rank's, readable on `keys_stream`."""
        self.halfway.begin()
        self._make_room(packing.stops[-1], 0)
        shared = self.keys[next(self.ops) % 2]
        if packing not in shared.views:
            if len(shared.views) >= PACKINGS:
                shared.views.clear()
            shared.views[packing] = packing.views(shared.of)
        # The op before this one may have been another stream's; if it was this one's, it has waited for all that.
        self._compute().wait_stream(self.keys_stream)
        packing.write(shared.mine, k, v)
        self.keys_stream.wait_stream(self._compute())
        with torch.cuda.stream(self.keys_stream):
            shared.handle.barrier(BARRIER, self.lost_after_ms)
        return shared.views[packing]

    def _end(self) -> None:
        self.held.clear()
        self.halfway.end()

    # ---- the ring --------------------------------------------------------------------------------------------------

    def ring_pass(
        self, k: Tensor, v: Tensor, lanes: list[slice], new: Callable[[int, slice], Sums], two_streams: bool = False
    ) -> Generator[RingStep]:
        *others, own = visiting_order(self.ring)
        packing = Packing.of(k, v, lanes)
        rooms = min(2, len(others))
        landings = [[packing.empty(k, number, 1) for _ in range(rooms)] for number in range(len(lanes))]
        shared = self._publish(k, v, packing)
        self.held["landings"] = landings
        read: dict[tuple[int, int], Any] = {}

        def pull(step: int, lane: int) -> tuple[Tensor, Any]:
            if step >= 2:
                self.keys_stream.wait_event(read.pop((step - 2, lane)))
            landing = landings[lane][step % rooms]
            with torch.cuda.stream(self.keys_stream):
                landing.copy_(shared[lane][others[step]][0])
                return landing, self._event(self.keys_stream)

        keys = {(step, lane): pull(step, lane) for step in range(min(2, len(others))) for lane in range(len(lanes))}

        def walk() -> Generator[RingStep]:
            first = others[0] if others else own
            # Those of a lane that it begins with, and room for the next ones: they change places at each step.
            sums = [_with_room(new(first, lane)) for lane in lanes]
            self.held["sums"] = sums
            room = self._room(sums[0][0], len(lanes)) if others else 0
            arrived: list[Any] = [None] * len(lanes)
            with self._streams(two_streams) as streams:
                turns = [(number, lane, streams.turn(number)) for number, lane in enumerate(lanes)]
                for step, source in enumerate(others):
                    for number, lane, at in turns:
                        landing, keys_arrived = keys.pop((step, number))
                        here, there = sums[number][step % 2], sums[number][(step + 1) % 2]
                        with at:
                            self._wait_for(arrived[number])
                            self._wait_for(keys_arrived)
                        yield RingStep(source, lane, *packing.apart(landing, number), here, at)
                        with at:
                            read[step, number] = self._event(self._compute())
                            if step + 2 < len(others):
                                keys[step + 2, number] = pull(step + 2, number)
                            arrived[number] = self._moved_on(here, there, number, room, first=step == 0)
                for number, lane, at in turns:
                    with at:
                        self._wait_for(arrived[number])
                    yield RingStep(own, lane, k[:, :, lane], v[:, :, lane], sums[number][len(others) % 2], at)
            # The next rank has copied the last sums once it says so. Only the next op's first sums wait for that.
            with torch.cuda.stream(self.sums_stream):
                for number in range(len(lanes)):
                    self._wait_for_signal(self._next, TAKEN + number)
            self._end()

        return walk()

    def _room(self, sums: Sums, lanes: int) -> int:
        """Bytes of each lane's part of the outbox, from the sums of the first lane, which has the most heads."""
        room = -(-sum(x.nbytes for x in sums) // ROUND) * ROUND
        self._make_room(0, room * lanes)
        return room

    def _moved_on(self, sums: Sums, arriving: Sums, lane: int, room: int, first: bool) -> Any:
        """Hands sums to the next rank and takes those of the rank before, for the keys that come next. The event after
        which they have arrived."""
        size = sum(x.nbytes for x in sums)
        assert self.outboxes is not None and size <= room, "lanes would write over each other's sums"
        box = slice(lane * room, lane * room + size)
        self.sums_stream.wait_stream(self._compute())
        with torch.cuda.stream(self.sums_stream):
            if not first:
                self._wait_for_signal(self._next, TAKEN + lane)
            for into, x in zip(_like(self.outboxes.mine[box], sums), sums, strict=True):
                into.copy_(x)
            self.outboxes.handle.put_signal(self._next, READY + lane, self.lost_after_ms)
            self._wait_for_signal(self._previous, READY + lane)
            for into, x in zip(arriving, _like(self.outboxes.of[self._previous][box], sums), strict=True):
                into.copy_(x)
            self.outboxes.handle.put_signal(self._previous, TAKEN + lane, self.lost_after_ms)
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

    def _streams(self, two_streams: bool) -> Abreast:
        return Abreast(self.other_stream if two_streams else None, self.device)

    def _compute(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def _event(self, stream: Any) -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def _make_room(self, keys: int, sums: int) -> None:
        """Larger buffers where these do not fit; every rank needs the same, so all come here together."""
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
        """Until no rank reads a buffer any more."""
        torch.cuda.synchronize(self.device)
        self.ring.numbers(0, self.ring.small_device(self.device), "made room for keys and values")
        torch.cuda.synchronize(self.device)


def _with_room(sums: Sums) -> tuple[Sums, Sums]:
    first, second = sums
    return sums, (torch.empty_like(first), torch.empty_like(second))


def _like(flat: Tensor, sums: Sums) -> Sums:
    """Bytes as two tensors like these."""
    first, second = sums
    one, other = flat.split([first.nbytes, second.nbytes])
    return one.view(first.dtype).view(first.shape), other.view(second.dtype).view(second.shape)


def _lost_after_ms(ring: Ring, device: torch.device) -> int:
    """How long the process group waits for a rank, as ddp_timeout sets it: pulls are no less patient than messages."""
    try:
        seconds = ring.group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # private in torch, and not every backend has it
        return LOST_AFTER_MS
    return max(1, math.ceil(seconds * 1000))  # 0 would be for ever
