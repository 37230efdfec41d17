"""Positions and distances of the tokens of a table of tiles, for a bias by distance."""

from __future__ import annotations

import torch
from torch import Tensor


def lowest_distance(tiles: Tensor) -> int:
    """The smallest kv_idx - q_idx of a visible pair; 0 if there is none."""
    first, _ = intervals(tiles)
    return int(first.min()) if len(first) else 0


def intervals(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The distances kv_idx - q_idx of each tile with visible pairs: first, and last + 1."""
    _, _, q_length, q_position, _, k_length, k_position, lo, hi = tiles.cpu().unbind(1)
    first = torch.maximum(k_position - (q_position + q_length - 1), -hi)
    stop = torch.minimum(k_position + k_length - 1 - q_position, -lo) + 1
    some = first < stop
    return first[some], stop[some]


def positions(tiles: Tensor, batch: int, tokens: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """``q_places``, ``k_places`` and [L] int64, the distances of a table's columns. A distance that no pair has is
    replaced by one that some pair has, since the function may give nan or an error for it."""
    of_q, of_k = (torch.zeros(batch, length, dtype=torch.int32, device="cpu") for length in (tokens, keys))
    for row, q, q_length, q_position, k, k_length, k_position, _, _ in tiles.tolist():
        of_q[row, q : q + q_length] = torch.arange(q_position, q_position + q_length, dtype=torch.int32, device="cpu")
        of_k[row, k : k + k_length] = torch.arange(k_position, k_position + k_length, dtype=torch.int32, device="cpu")
    first, stop = intervals(tiles)
    if not len(first):
        return of_q, of_k, torch.zeros(1, dtype=torch.int64, device="cpu")
    lowest, beyond = int(first.min()), int(stop.max())
    edges = torch.zeros(beyond - lowest + 1, dtype=torch.int64, device="cpu")
    edges.index_add_(0, first - lowest, torch.ones_like(first)).index_add_(0, stop - lowest, -torch.ones_like(stop))
    met = edges.cumsum(0)[:-1] > 0
    return of_q, of_k, torch.where(met, torch.arange(lowest, beyond, device="cpu"), lowest)
