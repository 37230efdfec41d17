"""Gathered keys and values that outlive their attention, for others of the very same ones.

An op takes tensors and numbers, so it is told by a number where to keep what it gathers, or where to find it. Who makes
a `GatheredKV` or a `ComparedKV` owns that memory: nothing here lets it live longer.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Generator, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.ring import Ring
from .two_streams import CURRENT_STREAM, StreamContext


class KVGroup(NamedTuple):
    """A group of key heads, and the keys and values [B, S, heads, ...] that they have.

    Args:
        at: they have come on the stream that this sets; whoever reads them queues that inside of it.
    """

    heads: slice
    k: Tensor
    v: Tensor
    at: StreamContext = CURRENT_STREAM


MAKES, TAKES, LAST = 1, 2, 3
"""The roles of layers that share: others attend to its keys and values; it attends to another one's; and is the last
of its model that does."""

COMPARED = "compared keys and values that layers share"

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class GatheredKV:
    """The keys and values [B, S, heads, ...] of one plan's forward, by groups of heads; None until all have come.

    For whoever knows that these are the keys and values that he attends to. Args of an op: its ``number`` and ``role``.
    """

    role: None = None

    def __init__(self) -> None:
        self.parts: list[KVGroup] | None = None
        self.number = _numbered(self)

    def filling(self, gathered: Iterable[KVGroup]) -> Generator[KVGroup]:
        """The same parts, which are kept once all of them have come."""
        parts = []
        for part in gathered:
            parts.append(part._replace(at=CURRENT_STREAM))
            yield part
        self.parts = parts


class LayerRole(NamedTuple):
    """What the op of a compiled layer is told: tensors, since a compiler makes a new graph for each new number.

    Args:
        number: [1] int64 on the CPU, of a `ComparedKV`.
        role: [1] int64 on the CPU, the layer's.
    """

    number: Tensor
    role: Tensor


class _Made(NamedTuple):
    k: Tensor
    v: Tensor
    kept: GatheredKV


class ComparedKV:
    """What the compiled layers of one batch keep for each other. They are told apart by their keys and values alone.

    Tensors have no identity in a graph: a compiler computes the same keys in several places, and writes others into
    their memory, unseen. So what a layer attends to is compared with copies of what was gathered, bit by bit, on every
    rank; one on which they differ makes all of them gather. This costs these copies, of a rank's own tokens, and for
    each layer that takes a message of 8 bytes and a stop of the host.

    Attributes:
        number: [1] int64 on the CPU.
    """

    def __init__(self) -> None:
        self.number = _numbered(self)
        self._made: dict[object, _Made] = {}

    def clear(self) -> None:
        """Keeps nothing any more."""
        self._made.clear()

    def kept(self, role: int, ring: Ring, plan: object, k: Tensor, v: Tensor) -> GatheredKV | None:
        """Where these keys and values [B, T, G, ...] are, or are to be left; None: neither. A collective.

        Args:
            plan: by its identity, what they are gathered for.
        """
        if recomputing():
            self.clear()
            return None
        like = plan, k.shape, v.shape, k.dtype
        if role == MAKES:
            made = self._made[like] = _Made(k.clone(), v.clone(), GatheredKV())
            return made.kept
        known = self._made.get(like)
        if role == LAST:
            self.clear()
        same = k.new_zeros(1, dtype=torch.int64)
        if known is not None and known.kept.parts is not None:
            same += _same_bits(k, known.k) & _same_bits(v, known.v)
        everywhere = ring.gather(same, COMPARED).wait()[0]
        return known.kept if known is not None and everywhere.all() else None


def gathered_kv_for(
    number: Tensor | None, role: Tensor | None, ring: Ring, plan: object, k: Tensor, v: Tensor
) -> GatheredKV | None:
    """What an op was told of by these two, for these keys and values; None: it gathers, and keeps nothing."""
    keeper = None if number is None else _ALIVE.get(int(number))
    if isinstance(keeper, ComparedKV):
        return None if role is None else keeper.kept(int(role), ring, plan, k, v)
    return keeper


def recomputing() -> bool:
    """Whether a backward is running, so that this is a checkpoint's recompute. The same on every rank."""
    return torch._C._current_graph_task_id() != -1


def small(number: int) -> Tensor:
    """[1] int64 on the CPU, for graphs of every mode."""
    with torch.inference_mode(False):
        return torch.tensor([number], dtype=torch.int64, device="cpu")


def _numbered(keeper: GatheredKV | ComparedKV) -> Tensor:
    number = next(_NUMBERS)
    _ALIVE[number] = keeper
    return small(number)


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    bits = _BITS[a.element_size()]
    return (a.view(bits) == b.view(bits)).all()


_NUMBERS = itertools.count(1)
_ALIVE: weakref.WeakValueDictionary[int, GatheredKV | ComparedKV] = weakref.WeakValueDictionary()
