"""Moves trained weights that start at zero to small random values for the self-check, and puts them back.

A new branch often starts as nothing: its last weight or its gate is zero. If it mixes tokens, a ring is wrong only once
that weight has moved, after the check. So the check moves it first. Frozen weights stay zero in training, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..context.introspect import is_dtensor, is_unit

NEAR_ZERO = 1e-4
"""The largest value of a weight that is moved. Scales of new branches start at 1e-6 to 1e-5, other weights at 1e-2."""
SIZE = 0.25
"""The mean size of a moved gate or bias, and of a moved matrix's output for inputs of size 1: half of what torch's own
initialisation of a Linear gives. In bfloat16 a difference in a much smaller branch would pass as rounding."""

_PERIOD = 65521
"""A prime, so that rows of a large matrix differ though values repeat."""


@contextmanager
def moved_from_zero(model: nn.Module) -> Iterator[None]:
    """Gives each trained weight of ``model`` that is zero, or nearly, other values inside; the same on every rank.

    Optimizers and graphs see none of it: each weight is the same tensor with the same version counter, and on exit it
    gets its bits back.
    """
    _reshard(model)
    moved = [(x, _local(x).clone(), values) for x, values in _moves(model)]
    try:
        for x, _, values in moved:
            _local(x).copy_(values)
        yield
    finally:
        _wait()
        for x, before, _ in moved:
            _local(x).copy_(before)
        _reshard(model)


def _moves(model: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Finds the weights to move, and makes their new values, in the shape and dtype of this rank's shard."""
    _wait()
    trained = [(number, x) for number, x in enumerate(model.parameters()) if x.requires_grad and _can_move(_local(x))]
    # Most weights show it by their first value, so few are read whole.
    firsts = _sizes([_local(x)[(0,) * x.dim()] for _, x in trained])
    near = [entry for entry, first in zip(trained, firsts, strict=True) if first <= NEAR_ZERO]
    largest = _sizes([torch.linalg.vector_norm(_local(x), math.inf) for _, x in near])
    for (number, x), size in zip(near, largest, strict=True):
        if size <= NEAR_ZERO:
            yield x, _values(number, x).view(_local(x).shape).to(_local(x))


def _can_move(x: Tensor) -> bool:
    return x.is_floating_point() and type(x) is Tensor and x.numel() > 0 and not (x.is_meta or x.is_inference())


def _sizes(values: list[Tensor]) -> list[float]:
    """The absolute values of single numbers, fetched from their device at once."""
    if not values:
        return []
    found: list[float] = torch.stack([x.to(values[0].device, torch.float32) for x in values]).abs().tolist()
    return found


def _values(number: int, x: Any) -> Tensor:
    """The new values of a shard of the model's ``number``-th weight: replicas of a shard get the same ones."""
    shard = 0
    if is_dtensor(x):
        places = zip(x.placements, x.device_mesh.get_coordinate(), x.device_mesh.shape, strict=True)
        for placement, coordinate, size in places:
            shard = shard if placement.is_replicate() else shard * size + coordinate
    count, start = _local(x).numel(), (7919 * number + 104729 * shard) % _PERIOD
    inputs = sorted((1, 1, *x.shape))[-2]  # of a matrix, whichever way it lies; one for a vector
    table = _table()[start:] if start + count <= _PERIOD else _table().roll(-start).repeat(-(-count // _PERIOD))
    return table[:count] * (SIZE / math.sqrt(inputs))


@cache
def _table() -> Tensor:
    """Values of size 0.5 to 1.5 with random signs: a single one of them, a gate, must not be near zero either."""
    drawn = torch.rand(_PERIOD, generator=torch.Generator().manual_seed(0))
    return torch.where(drawn < 0.5, -0.5 - 2 * drawn, 2 * drawn - 0.5)


def _local(x: Any) -> Tensor:
    """The values of a weight on this rank: its shard under FSDP2. Writing to them moves no version counter."""
    mine: Tensor = getattr(x, "_local_tensor", x).data
    return mine


def _reshard(model: nn.Module) -> None:
    """Drops the weights that FSDP2 has gathered and kept, since they would outlast a change of its shards."""
    for module in model.modules():
        if is_unit(module):
            module.reshard()  # type: ignore[operator]  # FSDPModule's


def _wait() -> None:
    """Waits for copies of weights in host memory that may be under way."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
