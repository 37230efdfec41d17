"""The keys that some queries see, as a dense mask: for code that must have one, a few queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .mask import Tile


def key_ranges(tiles: Tensor, batch: int, queries: int) -> Tensor:
    """The positions of the keys that each query sees, as ranges: [R, 2, B, T] int64 on the CPU, first and last + 1.

    R is the number of ranges that a query may need: 1 unless keys are hidden among those of a document. A range that is
    not needed is empty.

    Args:
        tiles: [N, 9] of `mask.tiles`, for tensors of ``batch`` rows of ``queries``.
    """
    used = torch.zeros(batch, queries, dtype=torch.int64)
    ranges: list[Tensor] = []
    for tile in map(Tile._make, tiles.tolist()):
        mine = slice(tile.q_offset, tile.q_offset + tile.q_length)
        place = int(used[tile.row, mine].max())
        if place == len(ranges):
            ranges.append(torch.zeros(2, batch, queries, dtype=torch.int64))
        used[tile.row, mine] = place + 1
        positions = torch.arange(tile.q_position, tile.q_position + tile.q_length)
        first = (positions - tile.hi).clamp(tile.k_position, tile.k_position + tile.k_length)
        stop = (positions - tile.lo + 1).clamp(tile.k_position, tile.k_position + tile.k_length)
        ranges[place][:, tile.row, mine] = torch.stack([first, stop])
    return torch.stack(ranges) if ranges else torch.zeros(0, 2, batch, queries, dtype=torch.int64)


def visible(ranges: Tensor, keys: int) -> Tensor:
    """[B, t, S] bool: the keys 0 to ``keys`` that queries see, by their ranges [R, 2, B, t], on these' device."""
    positions = torch.arange(keys, device=ranges.device)
    seen = torch.zeros(*ranges.shape[2:], keys, dtype=torch.bool, device=ranges.device)
    for first, stop in ranges:
        seen |= (positions >= first[..., None]) & (positions < stop[..., None])
    return seen
