"""Masks of compiled models: made on the host before the model is called, looked up inside its graph.

A compiler cannot trace the making of tiles, and must not cache them: the next batch has other documents. So the host
makes a kind of mask when a compiler first needs it, and from then on for every batch before the model is called. The
graph looks it up in the current batch by name, as inputs that each call reads again. If it is missing, a guard of the
compiler fails, and the mask is made then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...sharding.mask import UNBOUNDED
from ..context.batch_context import BatchContext


@dataclass(frozen=True)
class _Bounds:
    """Bounds read so far: lo <= query - key <= hi."""

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    device: None = None

    def __and__(self, other: _Bounds) -> _Bounds:
        return _Bounds(max(self.lo, other.lo), min(self.hi, other.hi))

    def to(self, _device: None) -> _Bounds:
        return self


class _Index:
    """A symbolic query or key index, less a distance, with which a mask function is called to read its band.

    A compiler hides closures, so functions are called here, not recognised. It supports only the operations that
    functions accepted by `readable` apply to indices.
    """

    def __init__(self, less: int = 0) -> None:
        self.less = less

    def new_ones(self, _shape: tuple[()], dtype: torch.dtype) -> _Bounds:
        return _Bounds()


class _Query(_Index):
    def __sub__(self, distance: int) -> _Query:
        return _Query(self.less + operator.index(distance))  # also a number that a compiler made symbolic

    def __ge__(self, zero: int) -> _Bounds:
        return _Bounds()


class _Key(_Index):
    def __le__(self, query: _Query) -> _Bounds:
        return _Bounds(lo=query.less)

    def __gt__(self, query: _Query) -> _Bounds:
        return _Bounds(hi=query.less - 1)


def readable(attention_mask: Tensor | None, config: Any, hints: dict[str, Any]) -> bool:
    """Returns True if masking_utils asks for a causal mask, with or without a window, or a bidirectional one.

    It allows skipping only these, and masks of chunks and of bidirectional windows.
    """
    if attention_mask is None or hints.get("use_vmap") or getattr(config, "attention_chunk_size", None) is not None:
        return False
    if hints.get("allow_is_causal_skip"):
        return True
    return bool(hints.get("allow_is_bidirectional_skip")) and hints.get("local_size") is None


def band_of(mask_function: Callable[..., Any]) -> tuple[int, int]:
    """lo and hi of a readable mask function."""
    bounds = mask_function(0, 0, _Query(), _Key())
    return bounds.lo, bounds.hi


def is_zero(offset: int | Tensor) -> bool:
    """Returns True for an offset of a mask's queries or keys that is the number 0."""
    return isinstance(offset, int) and offset == 0


def fits(
    context: BatchContext, config: Any, rows: int, q_length: int, kv_length: int, q_offset: Any, kv_offset: Any
) -> bool:
    """Returns True if a mask of these sizes is a shard's, for a prepared model."""
    if context.text is not None or not any(config is known for known in context.log.configs):
        return False
    if not (is_zero(q_offset) and is_zero(kv_offset)):
        return False
    return (rows, q_length, kv_length) == (*context.local_shape, context.local_shape[1])
