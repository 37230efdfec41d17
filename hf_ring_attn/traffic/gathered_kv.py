"""Gathered keys and values that several layers share, as in models with shared K/V.

An op takes only tensors and numbers, so a number identifies the `GatheredKV` or `ComparedKV` to fill or to reuse. The
caller that creates one owns its memory: this module holds weak references.
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
    """A group of key heads with their keys and values [B, S, heads, ...].

    Args:
        at: the stream on which they arrived; queue reads of them inside this context.
    """

    heads: slice
    k: Tensor
    v: Tensor
    at: StreamContext = CURRENT_STREAM


MAKES, TAKES, LAST = 1, 2, 3
"""The role of a layer that shares K/V: it provides them; it reuses them; it is the last of its model to reuse them."""

COMPARED = "compared keys and values that layers share"

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class GatheredKV:
    """Gathered K/V [B, S, heads, ...] of one layer, by groups of heads, reused by layers that share them.

    ``parts`` is None until all groups have arrived. An op takes its ``number`` and ``role``.
    """

    role: None = None

    def __init__(self) -> None:
        self.parts: list[KVGroup] | None = None
        self.number = _numbered(self)

    def filling(self, gathered: Iterable[KVGroup]) -> Generator[KVGroup]:
        """Passes the groups on, and stores them once all have arrived."""
        parts = []
        for part in gathered:
            parts.append(part._replace(at=CURRENT_STREAM))
            yield part
        self.parts = parts


class LayerRole(NamedTuple):
    """A compiled layer's store and role, as tensors: a compiler makes a new graph for each new number.

    Args:
        number: [1] int64 on the CPU, of a `ComparedKV`.
        role: [1] int64 on the CPU, the layer's.
    """

    number: Tensor
    role: Tensor


class _Made(NamedTuple):
    k: Tensor
    v: Tensor
    store: GatheredKV


class ComparedKV:
    """Gathered K/V that the compiled layers of one batch share, looked up by value.

    Tensors have no identity in a graph: a compiler may compute the same keys in several places, or reuse their memory.
    So each rank compares a layer's keys and values bit by bit with copies of the gathered ones, and all ranks gather
    if they differ on any. The cost: copies of the local tokens, and an 8-byte all-gather and a host sync per layer.

    Attributes:
        number: [1] int64 on the CPU.
    """

    def __init__(self) -> None:
        self.number = _numbered(self)
        self._made: dict[object, _Made] = {}

    def clear(self) -> None:
        """Frees everything stored."""
        self._made.clear()

    def find(self, role: int, ring: Ring, plan: object, k: Tensor, v: Tensor) -> GatheredKV | None:
        """Returns the store of these keys and values [B, T, G, ...], filled or to fill; None: no store. Collective.

        Args:
            plan: the plan that they are gathered for, compared by identity.
        """
        if is_recomputing():
            self.clear()
            return None
        like = plan, k.shape, v.shape, k.dtype
        if role == MAKES:
            made = self._made[like] = _Made(k.clone(), v.clone(), GatheredKV())
            return made.store
        known = self._made.get(like)
        if role == LAST:
            self.clear()
        same = k.new_zeros(1, dtype=torch.int64)
        if known is not None and known.store.parts is not None:
            same += _same_bits(k, known.k) & _same_bits(v, known.v)
        everywhere = ring.gather(same, COMPARED).wait()[0]
        return known.store if known is not None and everywhere.all() else None


def gathered_kv_for(
    number: Tensor | None, role: Tensor | None, ring: Ring, plan: object, k: Tensor, v: Tensor
) -> GatheredKV | None:
    """Looks up an op's store for these keys and values; None: the op gathers and stores nothing."""
    keeper = None if number is None else _ALIVE.get(int(number))
    if isinstance(keeper, ComparedKV):
        return None if role is None else keeper.find(int(role), ring, plan, k, v)
    return keeper


def number_of_backward() -> int:
    """The number of the backward that runs; -1 outside of backwards."""
    return int(torch._C._current_graph_task_id())


def is_recomputing() -> bool:
    """Returns True in a backward, that is, in a checkpoint's recompute. The same on every rank."""
    return number_of_backward() != -1


def number_tensor(number: int) -> Tensor:
    """[1] int64 on the CPU, for graphs of every mode."""
    with torch.inference_mode(False):
        return torch.tensor([number], dtype=torch.int64, device="cpu")


def _numbered(keeper: GatheredKV | ComparedKV) -> Tensor:
    number = next(_NUMBERS)
    _ALIVE[number] = keeper
    return number_tensor(number)


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    bits = _BITS[a.element_size()]
    return (a.view(bits) == b.view(bits)).all()


_NUMBERS = itertools.count(1)
_ALIVE: weakref.WeakValueDictionary[int, GatheredKV | ComparedKV] = weakref.WeakValueDictionary()
