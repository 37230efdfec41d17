"""A road on which everything has arrived: one process plays a rank of a ring."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from torch import Tensor

from ..comm.ring import Ring
from ..sharding.layout import Layout, Owners
from .base import RingStep, Sums, visiting_order
from .gathered_kv import KVGroup


class SimulatedTraffic:
    """What is alike in every `Traffic` without messages; where sums come from, each says itself.

    Args:
        row: k and v of the whole row, [B, padded, heads, width].
    """

    groups, bytes_per_gather = 1, 2**40

    def __init__(self, layout: Layout, row: Sequence[Tensor]) -> None:
        self.ring = Ring.simulated(layout.world_size, layout.rank)
        self._row = row
        self._of_ranks = [layout.split(x) for x in row]

    def gathered(
        self,
        k: Tensor,
        v: Tensor,
        groups: list[slice],
        owners: Owners = (),
        keep: bool = False,
        two_streams: bool = False,
    ) -> Generator[KVGroup]:
        for group in groups:
            yield KVGroup(group, self._row[0][:, :, group], self._row[1][:, :, group])

    def walk(self, lanes: list[slice], sums: Callable[[int, slice], Sums]) -> Generator[RingStep]:
        """The hops of a `Traffic`, with ``sums(source, lane)`` to add to."""
        for source in visiting_order(self.ring):
            for lane in lanes:
                keys, values = (x[source][:, :, lane] for x in self._of_ranks)
                yield RingStep(source, lane, keys, values, sums(source, lane))
