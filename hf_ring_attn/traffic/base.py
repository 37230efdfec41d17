"""What travels in a ring, whatever the road: keys and values to everyone, float32 sums of gradients to their home."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

from torch import Tensor

from ..comm.ring import Ring
from ..sharding.layout import Owners
from .gathered_kv import KVGroup
from .two_streams import CURRENT_STREAM, StreamContext

Sums = tuple[Tensor, Tensor]

PULLED = 64 * 2**20
"""`Traffic.bytes_per_gather` where keys are pulled, which takes no multiprocessors: measured, see recipes/results."""


class RingStep(NamedTuple):
    """A few heads of one rank's keys, where this rank adds to their gradients.

    Args:
        source: the rank whose keys they are.
        heads: which of the key heads.
        k, v: [B, T, heads, ...] of that rank, not always contiguous.
        sums: of dk and dv, opaque, with what the ranks before this one have added; to be added to in place.
        at: as in `KVGroup`.
    """

    source: int
    heads: slice
    k: Tensor
    v: Tensor
    sums: Sums
    at: StreamContext = CURRENT_STREAM


class Traffic(Protocol):
    """A road between the ranks of a ring. No road changes a bit of any result.

    ``groups`` and ``bytes_per_gather``: the heads of a gather are divided into so many groups at least, and into more
    where that keeps the gathered keys and values of one below so many bytes. All but the first travel while others are
    attended, but small groups cost more to launch (`head_groups`).
    """

    ring: Ring
    groups: int
    bytes_per_gather: int

    def gathered(
        self,
        k: Tensor,
        v: Tensor,
        groups: list[slice],
        owners: Owners = (),
        keep: bool = False,
        two_streams: bool = False,
    ) -> Generator[KVGroup]:
        """Keys and values [B, S, heads, ...] of the whole row in order, a group of heads at a time, the next group on
        its way meanwhile. The first sets out at once, before the iterator is asked for it.

        Args:
            owners: of the row's chunks, as in `Layout`.
            keep: without it the memory of a group may hold another one once the next is asked for.
            abreast: parts may be read on streams of their own, where a road has such; they are joined when the iterator
                ends or is closed.
        """
        ...

    def ring_pass(
        self, k: Tensor, v: Tensor, lanes: list[slice], new: Callable[[int, slice], Sums], two_streams: bool = False
    ) -> Generator[RingStep]:
        """Walks the ring: every rank's keys once, lane by lane, this rank's own last. The first set out at once.

        Sums start at the rank after the one whose keys they belong to, with ``new(source, lane)``, and move on when
        the walk is resumed: those of one lane travel while the other lane is computed. They are home when their owner
        adds to them, so nothing is left to wait for at the end. ``two_streams``: lanes may be added to on streams of
        their own, as in `gathered`.
        """
        ...


def visiting_order(ring: Ring) -> list[int]:
    """The ranks whose keys this rank meets: the one before it first, its own last."""
    return [(ring.rank - 1 - step) % ring.size for step in range(ring.size)]


def head_halves(heads: int, ring_size: int) -> list[slice]:
    """Two halves of the key heads, so that one half travels while the other is computed; one where that cannot be."""
    if ring_size == 1 or heads == 1:
        return [slice(0, heads)]
    middle = (heads + 1) // 2
    return [slice(0, middle), slice(middle, heads)]
