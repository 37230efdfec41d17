"""A transport without communication: one process simulates a rank of a ring and has the whole row."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from ..comm.ring import Ring
from ..sharding.layout import Layout
from .base import Gather, RingStep, Sums, visiting_order
from .gathered_kv import KVGroup


class SimulatedTraffic:
    """Base class of simulated transports; subclasses supply the accumulators of the ring pass.

    Args:
        row: k and v of the whole row, [B, padded, heads, width].
    """

    groups, bytes_per_gather, whole_below = 1, 2**40, 0

    def __init__(self, layout: Layout, row: Sequence[Tensor]) -> None:
        self.ring = Ring.simulated(layout.world_size, layout.rank)
        self._row = row
        self._of_ranks = [layout.split(x) for x in row]

    def gathered(self, request: Gather) -> Generator[KVGroup]:
        for group in request.groups:
            yield KVGroup(group, self._row[0][:, :, group], self._row[1][:, :, group])

    def steps(self, halves: list[slice], sums: Callable[[int, slice], Sums]) -> Generator[RingStep]:
        """Yields the steps of a ring pass, with ``sums(source, half)`` as accumulators."""
        for source in visiting_order(self.ring):
            for half in halves:
                keys, values = (x[source][:, :, half] for x in self._of_ranks)
                yield RingStep(source, half, keys, values, sums(source, half))
