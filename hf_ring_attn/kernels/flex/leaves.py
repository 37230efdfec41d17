"""The tensors that a score reads: leaves of its graph, in copies that take no memory.

A leaf with a gradient has two more dims, over which its values are expanded, so that different queries and keys add to
different elements of its gradient. With few elements millions of atomics would wait for each other and lose digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx

MOST_PLACES = 2**23
"""Most floats in the gradient of a leaf that copies enlarge: 32 MiB."""
MOST_KEYS, MOST_COPIES = 64, 2**13


class Copies(NamedTuple):
    """The number of copies of a leaf, by query and by key: powers of two."""

    queries: int
    keys: int

    @classmethod
    def of(cls, numbers: int) -> Copies:
        most = max(1, min(MOST_COPIES, MOST_PLACES // max(1, numbers)))
        copies = 1 << (most.bit_length() - 1)
        keys = min(MOST_KEYS, copies)
        return cls(copies // keys, keys)


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor that a score reads at one index.

    Args:
        value: the node that computes it.
        picked: (dim, node) of its dims with a constant index, the last dim first.
        copies: None if it has no gradient.
        shape, dtype: of the remaining dims.
    """

    value: fx.Node
    picked: tuple[tuple[int, fx.Node], ...]
    copies: Copies | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def spread(value: Tensor, copies: Copies | None, dtype: torch.dtype) -> Tensor:
    """Expands a leaf's value to [copies by query, ..., copies by key], without memory."""
    value = value.detach()
    value = value.to(dtype) if value.is_floating_point() else value
    value = value.contiguous()
    if copies is None:
        return value
    shape = (copies.queries, *value.shape, copies.keys)
    return value.unsqueeze(0).unsqueeze(-1).expand(shape).detach().requires_grad_()  # no view: it is a leaf


def sum_copies(gradient: Tensor) -> Tensor:
    """Sums the gradient of a leaf's copies in float64."""
    return gradient.sum((0, gradient.dim() - 1), dtype=torch.float64)
