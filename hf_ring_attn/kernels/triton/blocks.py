"""Block sizes by GPU family: a fixed table, not tuned at run time, so that ranks and runs agree to the bit.

recipes/tune_triton.py measures the rows of a GPU. Those of "ampere" and "ada" were measured on an H100 that ran their
instructions within their shared memory (recipes/like_gpu.py). Rows of families that were never measured say so.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """One launch: queries and keys in a block, warps of a program, stages of its software pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


class Row(NamedTuple):
    """The blocks of one family of GPUs, width of an element and width of a head.

    ``keys``: for dk and dv; ``queries``: for dq. With ``values``, ``keys`` is for dk and ``values`` for dv: one more
    product per pair of blocks, since wide heads leave no registers for both.
    """

    forward: Blocks
    keys: Blocks
    queries: Blocks
    values: Blocks | None = None


FAMILIES = {"ampere": ((8, 0), (8, 7)), "ada": ((8, 6), (8, 9), (12, 0), (12, 1)), "hopper": ((9, 0),)}
"""The compute capabilities of each family. A program may have 163, 99 and 227 KiB of shared memory. 12.0 and 12.1
multiply with the instruction of 8.9."""

WIDTHS = (64, 128, 192, 256, 512)
"""A head's width is rounded up to one of these to find its row; narrower heads take the first."""
NARROWER_VALUES = {192: 128}
"""Rows for heads with values at most this wide."""

_TINY = Blocks(16, 16, 4, 1)
_SMALL = Blocks(32, 32, 4, 1)

TABLE: dict[tuple[str, int, int], Row] = {
    # (family, bytes of an element, width): measured on an H200, see recipes/results
    ("hopper", 2, 64): Row(Blocks(64, 128, 4, 2), Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3)),
    ("hopper", 2, 128): Row(Blocks(128, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    ("hopper", 2, 192): Row(Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 64, 4, 2)),
    ("hopper", 2, 256): Row(Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 64, 4, 2)),
    ("hopper", 2, 512): Row(Blocks(64, 128, 8, 1), Blocks(32, 32, 4, 1), Blocks(16, 64, 4, 1), Blocks(128, 64, 8, 1)),
    ("hopper", 4, 64): Row(Blocks(64, 64, 4, 2), Blocks(128, 32, 8, 1), Blocks(64, 64, 4, 1)),
    ("hopper", 4, 128): Row(Blocks(32, 64, 4, 1), Blocks(64, 32, 8, 1), Blocks(32, 64, 4, 1)),
    ("hopper", 4, 256): Row(Blocks(16, 32, 4, 1), Blocks(32, 16, 4, 1), Blocks(16, 32, 4, 1)),
    ("ampere", 2, 64): Row(Blocks(128, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(128, 32, 4, 2)),
    ("ampere", 2, 128): Row(Blocks(128, 32, 4, 2), Blocks(64, 128, 8, 2), Blocks(128, 32, 4, 2)),
    ("ampere", 2, 192): Row(Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2)),
    ("ampere", 2, 256): Row(Blocks(64, 128, 8, 1), Blocks(64, 64, 8, 2), Blocks(64, 128, 8, 1)),
    ("ampere", 2, 512): Row(Blocks(64, 32, 8, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 2), Blocks(64, 64, 8, 1)),
    ("ampere", 4, 64): Row(Blocks(64, 32, 4, 2), Blocks(128, 32, 8, 1), Blocks(32, 64, 4, 1)),
    ("ampere", 4, 128): Row(Blocks(32, 64, 4, 1), Blocks(64, 32, 8, 1), Blocks(32, 64, 8, 1)),
    ("ampere", 4, 256): Row(Blocks(32, 64, 8, 1), Blocks(32, 16, 4, 1), Blocks(16, 16, 4, 1)),
    ("ada", 2, 64): Row(Blocks(128, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(128, 32, 4, 2)),
    ("ada", 2, 128): Row(Blocks(128, 32, 4, 2), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 2)),
    ("ada", 2, 192): Row(Blocks(128, 32, 8, 2), Blocks(64, 32, 4, 2), Blocks(32, 64, 4, 2)),
    ("ada", 2, 256): Row(Blocks(64, 64, 8, 1), Blocks(32, 32, 4, 2), Blocks(32, 64, 4, 1)),
    ("ada", 2, 512): Row(Blocks(32, 32, 8, 2), Blocks(32, 16, 4, 1), Blocks(16, 32, 4, 1), Blocks(32, 32, 4, 1)),
    ("ada", 4, 64): Row(Blocks(64, 32, 4, 2), Blocks(128, 32, 8, 1), Blocks(32, 64, 4, 1)),
    ("ada", 4, 128): Row(Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1), Blocks(32, 64, 8, 1)),
    ("ada", 4, 256): Row(Blocks(32, 32, 8, 1), Blocks(16, 16, 4, 1), Blocks(16, 32, 4, 1)),
    # never measured: sizes that fit the smallest shared memory of the family (100 KiB, 64 KiB on ROCm)
    ("other", 2, 64): Row(Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    ("other", 2, 128): Row(Blocks(64, 32, 4, 2), Blocks(32, 64, 4, 1), Blocks(64, 32, 4, 1)),
    ("other", 2, 256): Row(Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1), Blocks(32, 16, 4, 1)),
    ("other", 2, 512): Row(_TINY, _TINY, _TINY),
    ("other", 4, 64): Row(_SMALL, _SMALL, _SMALL),
    ("other", 4, 128): Row(Blocks(32, 16, 4, 1), _TINY, _TINY),
    ("other", 4, 256): Row(_TINY, _TINY, _TINY),
}

WITH_BIAS: dict[tuple[str, int, int], Row] = {
    ("hopper", 2, 64): Row(Blocks(64, 64, 4, 1), Blocks(64, 64, 4, 1), Blocks(128, 128, 8, 1)),
    ("hopper", 2, 128): Row(Blocks(64, 32, 4, 2), Blocks(64, 64, 4, 1), Blocks(128, 128, 8, 1)),
    ("ampere", 2, 64): Row(Blocks(64, 128, 4, 2), Blocks(64, 64, 4, 1), Blocks(64, 64, 4, 1)),
    ("ampere", 2, 128): Row(Blocks(64, 64, 4, 1), Blocks(64, 64, 4, 1), Blocks(64, 64, 4, 1)),
    ("ada", 2, 64): Row(Blocks(64, 32, 4, 2), Blocks(64, 64, 4, 1), Blocks(64, 64, 4, 1)),
    ("ada", 2, 128): Row(Blocks(64, 64, 4, 1), Blocks(64, 64, 8, 1), Blocks(64, 128, 8, 1)),
}
"""Rows that differ with a bias by distance, whose positions take registers."""

INTERPRETER = Row(Blocks(32, 16, 1, 1), Blocks(16, 32, 1, 1), Blocks(32, 16, 1, 1))
"""For CPU tensors in Triton's interpreter: unequal sides, to expose mix-ups; few programs, since it is slow."""


def row_for(
    device: torch.device, element_bytes: int, head_dim: int, value_dim: int, descriptors: bool, bias: bool = False
) -> Row:
    """The shipped row for tensors on ``device``; the same for every length, so that lengths do not change bits.

    Args:
        descriptors: the GPU's copy engine fetches the blocks. Without it addresses take registers, so a block has half
            the queries; the keys of a block, which order the sums, stay the same.
        bias: with a bias by distance.
    """
    if device.type == "cpu":
        return INTERPRETER
    family = family_of(device)
    widths = [width for width in WIDTHS if head_dim <= width and value_dim <= NARROWER_VALUES.get(width, width)]
    key = next(key for width in widths if (key := (family, element_bytes, width)) in TABLE)
    row = WITH_BIAS.get(key, TABLE[key]) if bias else TABLE[key]
    if family == "hopper" and not descriptors:
        row = row._replace(forward=row.forward._replace(queries=min(row.forward.queries, 64)))
    return row


def widest_head(device: str, element_bytes: int) -> int:
    """The widest head with a row for the current device of that type; of elements without rows, that of any."""
    if device != "cuda" or not torch.cuda.is_available():
        return WIDTHS[-1]
    family = family_of(torch.device("cuda", torch.cuda.current_device()))
    return max((width for of, size, width in TABLE if (of, size) == (family, element_bytes)), default=WIDTHS[-1])


@cache
def family_of(device: torch.device) -> str:
    """A key of `FAMILIES`, or "other"."""
    capability = _cuda_capability(device)
    return next((family for family, members in FAMILIES.items() if capability in members), "other")


@cache
def has_copy_engine(device: torch.device) -> bool:
    """Returns True if blocks can be fetched by descriptors: NVIDIA's Hopper and later."""
    return _cuda_capability(device) >= (9, 0)


def _cuda_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; (0, 0) for devices that are not NVIDIA's."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
