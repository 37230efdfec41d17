"""The keys that each query sees, computed from a table of tiles: as intervals, and a few queries at a time as a mask.

A query sees one interval of keys in each tile. Adjacent intervals are joined; a query with holes in its keys has
several, one in each of the layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mask import UNBOUNDED, Tile

FAR = 2**31
"""Larger than any distance: a limit for bounds of bands, and a base to pack two indices into one integer."""


def bounds(tiles: Tensor, batch: int, tokens: int) -> Tensor:
    """Computes [L, 2, B, T] int32: query t of row b sees keys first <= key < stop of L layers, disjoint, ascending.

    As naive code::

        for row, q_offset, q_length, q_position, k_offset, k_length, k_position, lo, hi in tiles:
            for i in range(q_length):
                keys[row, q_offset + i] |= {k_offset + j for j in range(k_length)
                                            if lo <= (q_position + i) - (k_position + j) <= hi}

    L is a power of two, at least 1; unused layers of a query are (0, 0). Offsets are indices in the tensors.
    """
    row, q_first, q_stop, k_first, k_stop, lo, hi = columns(tiles)
    tile, query = expand(q_first, q_stop)
    first = torch.maximum(k_first[tile], query - hi[tile])
    stop = torch.minimum(k_stop[tile], query - lo[tile] + 1)
    seen = first < stop
    token, first, stop = (row[tile] * tokens + query)[seen], first[seen], stop[seen]

    order = torch.argsort(token * FAR + first)
    token, first, stop = token[order], first[order], stop[order]
    same = torch.zeros_like(token, dtype=torch.bool)
    same[1:] = token[1:] == token[:-1]
    joins = same.clone()
    joins[1:] &= first[1:] == stop[:-1]
    starts = torch.nonzero(~joins).flatten()  # the first piece of each interval
    ends = torch.cat([starts, starts.new_tensor([len(token)])])[1:] - 1
    token, first, stop, same = token[starts], first[starts], stop[ends], same[starts]
    layer = _rank_in_group(~same)
    most = int(layer.max()) if len(layer) else 0
    layers = 1 << most.bit_length()

    table = torch.zeros(layers, 2, batch * tokens, dtype=torch.int32, device="cpu")
    table[layer, 0, token] = first.int()
    table[layer, 1, token] = stop.int()
    return table.view(layers, 2, batch, tokens)


def by_position(tiles: Tensor) -> Tensor:
    """The tiles [N, 9] for keys that lie in the order of the row, wherever a rank's tensors have them."""
    position, offset = Tile._fields.index("k_position"), Tile._fields.index("k_offset")
    tiles = tiles.clone()
    tiles[:, offset] = tiles[:, position]
    return tiles


def visible(layers: Tensor, keys: int) -> Tensor:
    """[B, t, S] bool: the keys 0 to ``keys`` that queries see, by their `bounds` [L, 2, B, t], on these' device."""
    positions = torch.arange(keys, device=layers.device)
    seen = torch.zeros(*layers.shape[2:], keys, dtype=torch.bool, device=layers.device)
    for first, stop in layers:
        seen |= (positions >= first[..., None]) & (positions < stop[..., None])
    return seen


def columns(tiles: Tensor) -> tuple[Tensor, ...]:
    """row, q_first, q_stop, k_first, k_stop, lo, hi, with the band in offsets: lo <= q_offset - k_offset <= hi."""
    row, q, q_length, q_position, k, k_length, k_position, lo, hi = tiles.cpu().unbind(1)
    shift = (q_position - q) - (k_position - k)
    lo = torch.where(lo <= -UNBOUNDED, -FAR, (lo - shift).clamp(-FAR, FAR))
    hi = torch.where(hi >= UNBOUNDED, FAR, (hi - shift).clamp(-FAR, FAR))
    return row, q, q + q_length, k, k + k_length, lo, hi


def expand(start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Enumerates the pairs (i, x) with start[i] <= x < stop[i]."""
    count = stop - start
    owner = torch.repeat_interleave(torch.arange(len(start), device="cpu"), count)
    before = count.cumsum(0) - count
    return owner, torch.arange(len(owner), device="cpu") - before[owner] + start[owner]


def _rank_in_group(opens: Tensor) -> Tensor:
    """Counts 0, 1, 2, ... from each True."""
    index = torch.arange(len(opens), device="cpu")
    return index - torch.where(opens, index, 0).cummax(0).values if len(opens) else index
