"""Transport by send/recv between neighbours and all-gather: NCCL or gloo, on any number of machines."""

from __future__ import annotations

from collections.abc import Callable, Generator

from torch import Tensor

from ..comm.ring import Pending, Ring
from ..sharding.layout import Layout
from .base import Gather, RingStep, Sums, in_order, visiting_order
from .gathered_kv import KVGroup
from .interrupted import interruption_guard

KEYS = "passed keys and values on"


class Messages:
    """Implements `Traffic` with NCCL or gloo."""

    groups, bytes_per_gather, whole_below = 2, 256 * 2**20, 0

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def gathered(self, request: Gather) -> Generator[KVGroup]:
        k, v, groups, owners, *_ = request
        layout = Layout(k.shape[1] * self.ring.size, self.ring.size, self.ring.rank, owners)
        guard = interruption_guard(self.ring)
        return in_order(self.ring.by_heads((k, v), groups, guard.sending(self.ring.gather)), layout.merge, guard)

    def ring_pass(
        self, k: Tensor, v: Tensor, halves: list[slice], new: Callable[[int, slice], Sums], two_streams: bool = False
    ) -> Generator[RingStep]:
        sources = visiting_order(self.ring)
        guard = interruption_guard(self.ring)
        send_on = guard.sending(self.ring.send_on)

        def steps(keys: Pending | None) -> Generator[RingStep]:
            sums: list[Pending | None] = [None] * len(halves)
            for step, source in enumerate(sources):
                last = step + 1 == len(sources)
                here = (k, v)
                if keys is not None:
                    here = _pair(keys)
                    keys = send_on(here, KEYS) if step + 2 < len(sources) else None
                for number, half in enumerate(halves):
                    arrived = sums[number]
                    total = new(source, half) if arrived is None else _pair(arrived)
                    yield RingStep(source, half, here[0][:, :, half], here[1][:, :, half], total)
                    if not last:
                        sums[number] = send_on(total, "passed gradients on")
            guard.end()

        return steps(None if self.ring.size == 1 else send_on((k, v), KEYS))


def _pair(pending: Pending) -> Sums:
    first, second = pending.wait()
    return first, second
