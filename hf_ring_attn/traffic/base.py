"""The transport interface: all-gather of keys and values, and a ring pass with float32 gradient accumulators."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from ..comm.ring import Ring
from ..sharding.layout import Owners
from .gathered_kv import KVGroup
from .interrupted import InterruptionGuard
from .two_streams import CURRENT_STREAM, StreamContext

Sums = tuple[Tensor, Tensor]

PULLED = 64 * 2**20
"""`Traffic.bytes_per_gather` of P2P copies, which use no multiprocessors: measured, see recipes/results."""
WHOLE = 2**30
"""`Traffic.whole_below` of P2P copies: twice what 8192 tokens of Llama 3.1 8B have on two GPUs. There a step without
checkpointing waits for the host, which two halves of the heads keep busy longer than the copies of all heads take."""


class Gather(NamedTuple):
    """An all-gather of keys and values.

    Args:
        k, v: [B, T, G, ...] of this rank's tokens.
        groups: of heads.
        owners: of the row's chunks, as in `Layout`.
        keep: give each group its own memory; otherwise later groups reuse it.
        two_streams: groups may alternate between two streams, which join when the iterator ends or is closed.
    """

    k: Tensor
    v: Tensor
    groups: list[slice]
    owners: Owners = ()
    keep: bool = False
    two_streams: bool = False


class RingStep(NamedTuple):
    """One step of a ring pass: some key heads of one rank, and the accumulators of their gradients.

    Args:
        source: the rank that owns these keys.
        heads: the key heads.
        k, v: [B, T, heads, ...] of that rank, not always contiguous.
        sums: dk and dv accumulators (opaque) with the sums of the ranks before this one; add to them in place.
        at: as in `KVGroup`.
    """

    source: int
    heads: slice
    k: Tensor
    v: Tensor
    sums: Sums
    at: StreamContext = CURRENT_STREAM


class Traffic(Protocol):
    """A transport between the ranks of a ring. All transports give the same bits.

    A gather is split into at least ``groups`` groups of heads, and into more if one group would exceed
    ``bytes_per_gather``. The transfer of each group but the first overlaps with attention on the one before it. Small
    groups cost more to launch (`head_groups`), so an attention of fewer scores than ``whole_below`` (queries of a
    kernel's call x keys of the row x query heads) is not split at all, in either pass.
    """

    ring: Ring
    groups: int
    bytes_per_gather: int
    whole_below: int

    def gathered(self, request: Gather) -> Generator[KVGroup]:
        """All-gathers keys and values [B, S, heads, ...] of the row in order, one group of heads at a time.

        The transfer of the first group starts at once; that of each later group overlaps with the use of the one
        before it.
        """
        ...

    def ring_pass(
        self, k: Tensor, v: Tensor, halves: list[slice], new: Callable[[int, slice], Sums], two_streams: bool = False
    ) -> Generator[RingStep]:
        """Passes keys and values around the ring: yields every rank's once per head half, this rank's own last.

        The accumulators of a rank's keys start at the next rank as ``new(source, half)``. Each is sent on when the
        generator resumes, and the transfer of one half overlaps with the computation of the other. The owner adds to
        them last, so nothing is left to wait for. ``two_streams``: halves may alternate between streams, as in
        `Gather`.
        """
        ...


def in_order(
    sent: Iterator[tuple[slice, list[Tensor]]], order: Callable[[Tensor], Tensor], guard: InterruptionGuard
) -> Generator[KVGroup]:
    """Yields each group of heads that `Ring.by_heads` received, with keys and values in the order of the row."""
    for group, received in sent:
        keys, values = (order(received.pop(0)) for _ in range(2))
        yield KVGroup(group, keys, values)
        del keys, values  # before the next ones arrive
    guard.end()  # by now a backward has returned the last gradients, too


def visiting_order(ring: Ring) -> list[int]:
    """The source ranks of a ring pass, in order: the previous rank first, this rank last."""
    return [(ring.rank - 1 - step) % ring.size for step in range(ring.size)]


def head_halves(heads: int, ring_size: int) -> list[slice]:
    """Splits the key heads in two if it can, so that sending one half overlaps with computing the other."""
    if ring_size == 1 or heads == 1:
        return [slice(0, heads)]
    middle = (heads + 1) // 2
    return [slice(0, middle), slice(middle, heads)]
