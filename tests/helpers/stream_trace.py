"""What is queued on the streams of several ranks, and whether any two accesses to the same bytes are in no order.

Ranks run one after the other on the CPU, in this process; streams, events, signals and barriers are fakes that note who
waits for whom. What torch's ops read and write is noted beside it, so a race shows in the order alone, however the
times fall. Freed memory is written by the stream that allocated it, as its next owner may.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ring_attn.traffic import pulls
from hf_ring_attn.traffic.packing import Packing

OWNER = "another owner"


class Access(NamedTuple):
    node: int
    bytes: np.ndarray[Any, Any]
    """Sorted, each once."""
    write: bool
    what: str


class Stream:
    def __init__(self, trace: Trace, name: str) -> None:
        self.trace, self.name, self.last = trace, name, trace.node(None, ())
        self.freed: list[tuple[int, int]] = []

    def queue(self, *after: int) -> int:
        self.last = self.trace.node(self, (self.last, *after))
        while self.freed:
            self.trace.written_anew(self.last, *self.freed.pop())
        return self.last

    def wait_stream(self, other: Stream) -> None:
        self.queue(other.last)

    def wait_event(self, event: Event) -> None:
        self.queue(event.node)


class Event:
    node = 0

    def record(self, stream: Stream) -> None:
        self.node = stream.last


class Trace(TorchDispatchMode):
    """Of all ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.after: list[tuple[int, ...]] = [()]
        self.stream_of: list[Stream | None] = [None]
        self.accesses: dict[int, list[Access]] = defaultdict(list)
        self.known: dict[int, int] = {}
        self.owner: dict[int, Stream] = {}
        self.current: list[Stream] = []
        self.streams: list[Stream] = []
        self.rank = 0
        self.shared: dict[tuple[int, int], Tensor] = {}
        self.meetings: dict[tuple[object, ...], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.noting = True

    def node(self, stream: Stream | None, after: tuple[int, ...]) -> int:
        self.after.append(after)
        self.stream_of.append(stream)
        return len(self.after) - 1

    # ---- what ops read and write -----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or not self.noting:
            return out
        node = self.current[-1].queue()
        given: list[Tensor] = []
        written: list[Tensor] = []
        for number, value in enumerate((*args, *(kwargs or {}).values())):
            tensors = [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor)]
            names = [argument.name for argument in func._schema.arguments]
            name = names[number] if number < len(args) else list(kwargs)[number - len(args)]
            (argument,) = (one for one in func._schema.arguments if one.name == name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else given).extend(tensors)
        written += [x for x in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(x, Tensor)]
        for x in given:
            self._note(node, x, False, str(func))
        for x in written:
            self._note(node, x, True, str(func))
        return out

    def _note(self, node: int, x: Tensor, write: bool, what: str) -> None:
        if not x.numel():
            return
        places: np.ndarray[Any, Any] = np.full(1, int(x.storage_offset()))
        for size, stride in zip(x.shape, x.stride(), strict=True):
            places = (places[:, None] + np.arange(int(size)) * int(stride)).ravel()
        each = x.element_size()
        found = np.unique((places[:, None] * each + np.arange(each)).ravel())
        self.accesses[self._identity(x)].append(Access(node, found, write, f"rank {self.rank}: {what}"))

    def _identity(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        address = storage._cdata
        if address not in self.known:
            self.known[address] = identity = len(self.owner)
            self.owner[identity] = self.current[-1]
            weakref.finalize(storage, self._freed, address, storage.nbytes())
        return self.known[address]

    def _freed(self, address: int, size: int) -> None:
        identity = self.known.pop(address)
        self.owner[identity].freed.append((identity, size))

    def written_anew(self, node: int, identity: int, size: int) -> None:
        self.accesses[identity].append(Access(node, np.arange(size), True, OWNER))

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """What is on the host, or was made before."""
        before, self.noting = self.noting, False
        yield
        self.noting = before

    def new_stream(self) -> Stream:
        """Of this rank."""
        self.streams.append(Stream(self, f"stream {len(self.streams)} of rank {self.rank}"))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """What a program queues on one of its own; None: on its first."""
        self.current.append(stream or self.current[-1])
        yield
        self.current.pop()

    def reuse(self) -> None:
        """All that was freed has another owner."""
        for stream in self.streams:
            stream.queue()

    # ---- who waits for whom ----------------------------------------------------------------------------------------

    def meet(self, *name: object, waits: bool) -> None:
        """The n-th that waits at one of these names does so for the n-th of each that arrives there."""
        side = f"waits {self.rank}" if waits else f"arrives {self.rank}"
        self.meetings[name][side].append(self.current[-1].queue())

    def races(self) -> list[str]:
        """Pairs of accesses, in words."""
        for sides in self.meetings.values():
            waits = [nodes for side, nodes in sides.items() if side.startswith("waits")]
            arrives = [nodes for side, nodes in sides.items() if side.startswith("arrives")]
            for nodes in waits:
                for number, node in enumerate(nodes):
                    self.after[node] = (*self.after[node], *(one[number] for one in arrives if number < len(one)))
        before = self._before()
        found = []
        for accesses in self.accesses.values():
            for at, one in enumerate(accesses):
                for other in accesses[at + 1 :]:
                    if not (one.write or other.write) or self.stream_of[one.node] is self.stream_of[other.node]:
                        continue
                    ordered = before[one.node] >> other.node & 1 or before[other.node] >> one.node & 1
                    if OWNER in (one.what, other.what):  # who comes after all others, in any case
                        last, first = (one, other) if one.what == OWNER else (other, one)
                        ordered = before[last.node] >> first.node & 1
                    if not ordered and np.intersect1d(one.bytes, other.bytes, assume_unique=True).size:
                        names = [getattr(self.stream_of[x.node], "name", "") for x in (one, other)]
                        found.append(f"{one.what} on {names[0]} / {other.what} on {names[1]}")
        return found

    def _before(self) -> list[int]:
        """For each node the set of those that come before it, as bits."""
        found: list[int | None] = [None] * len(self.after)
        for start in range(len(self.after)):
            stack = [start]
            while stack:
                node = stack[-1]
                missing = [x for x in self.after[node] if found[x] is None]
                if found[node] is None and missing:
                    assert len(stack) <= len(self.after), "ranks wait for each other in a circle"
                    stack += missing
                    continue
                stack.pop()
                if found[node] is None:
                    bits = 1 << node
                    for x in self.after[node]:
                        bits |= found[x] or 0
                    found[node] = bits
        return [x or 0 for x in found]


@contextmanager
def rank(trace: Trace, number: int, ranks: int) -> Iterator[pulls.Pulls]:
    """Pulls of one rank, whose streams are noted; what runs inside is noted, too."""
    trace.rank = number
    made: list[Stream] = []
    trace.streams = made
    shared = iter(range(10**6))

    def stream(*_: object, **__: object) -> Stream:
        return trace.new_stream()

    class Within:
        """Can be entered again, as torch's."""

        def __init__(self, chosen: Stream) -> None:
            self.chosen = chosen

        def __enter__(self) -> None:
            trace.current.append(self.chosen)

        def __exit__(self, *_: object) -> None:
            assert trace.current.pop() is self.chosen

    class Memory:
        made = 0

        def __init__(self, _ring: object, size: int, _device: object) -> None:
            self.size, self.views, self.handle = size, dict[Packing, object](), mock.MagicMock()
            mine = next(shared)
            with trace.unnoted():  # all ranks make it together
                for other in range(ranks):
                    if (mine, other) not in trace.shared:
                        trace.shared[mine, other] = torch.zeros(size, dtype=torch.uint8)
            self.of = [trace.shared[mine, other] for other in range(ranks)]
            self.mine = self.of[number]

            def barrier(channel: int, _ms: int) -> None:
                trace.meet(mine, "barrier", channel, waits=False)
                trace.meet(mine, "barrier", channel, waits=True)

            self.handle.barrier = barrier
            self.handle.put_signal = lambda to, channel, _: trace.meet(mine, number, to, channel, waits=False)
            self.handle.wait_signal = lambda of, channel, _: trace.meet(mine, of, number, channel, waits=True)

    def synchronize(_device: object) -> None:
        done = [one.last for one in made]
        for one in made:
            one.queue(*done)

    def numbers(number: int, *_: object) -> list[int]:
        trace.meet("numbers", waits=False)
        trace.meet("numbers", waits=True)
        return [number]

    def current(*_: object) -> Stream:
        return trace.current[-1]

    fakes: dict[str, Any] = {
        "Stream": stream,
        "stream": Within,
        "current_stream": current,
        "Event": Event,
        "synchronize": synchronize,
    }
    with mock.patch.multiple(torch.cuda, **fakes), mock.patch.object(pulls, "Shared", Memory):
        main = stream()
        ring: Any = SimpleNamespace(
            rank=number,
            size=ranks,
            name="traced",
            numbers=numbers,
            small_device=lambda device: device,
            group=mock.Mock(spec=[]),
            state=cache(lambda kind: kind()),
        )
        trace.current.append(main)
        try:
            transport = pulls.Pulls(ring, torch.device("cpu"))
            with trace:
                yield transport
        finally:
            trace.current.pop()
