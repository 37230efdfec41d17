"""Conversion of tables of tiles to FlexAttention's masks: positions of tokens, and visible blocks.

Without holes a query sees all given keys of its batch row between two positions. So a mask is two numbers per query and
one per key, for any number of tiles, chunks and documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...sharding.mask import Tile

BLOCK = 128
"""Queries, and keys, of a block that FlexAttention can skip. Its own blocks divide this."""

NOWHERE = -1
BEYOND = 2**30


@dataclass(frozen=True, eq=False)
class MaskTable:
    """One table for tensors of given shapes, on the device. All are int32.

    Args:
        first, last: [B, T], positions of the first and last key that a query sees; last < first if it sees none.
        keys: [B, S], the position of each key; -1 if no query sees it.
        rows, queries, low, high: [B, T], the arguments of a score_mod: batch row, position, first and last; for a query
            that sees no key, those of another query.
        blocks: arguments of BlockMask: for each block of queries the blocks of keys that it sees in part, and in full.
    """

    first: Tensor
    last: Tensor
    keys: Tensor
    rows: Tensor
    queries: Tensor
    low: Tensor
    high: Tensor
    blocks: tuple[Tensor, Tensor, Tensor, Tensor]
    mask: Any = None

    @classmethod
    def of(cls, tiles: Tensor, batch: int, tokens: int, keys: int, device: torch.device) -> MaskTable | None:
        """Builds the table; None if no query sees a key."""
        with torch.inference_mode(False), torch.no_grad():
            return _places(tiles, batch, tokens, keys, device)


def _places(tiles: Tensor, batch: int, tokens: int, keys: int, device: torch.device) -> MaskTable | None:
    def full(size: int, value: int) -> Tensor:
        return torch.full((batch, size), value, dtype=torch.int32, device="cpu")

    first, last, at_query, at_key = full(tokens, BEYOND), full(tokens, NOWHERE), full(tokens, 0), full(keys, NOWHERE)
    seen = full(tokens, 0)
    for tile in map(Tile._make, tiles.tolist()):
        of_q = slice(tile.q_offset, tile.q_offset + tile.q_length)
        of_k = slice(tile.k_offset, tile.k_offset + tile.k_length)
        here = torch.arange(tile.q_position, tile.q_position + tile.q_length, device="cpu")
        low = (here - tile.hi).clamp(min=tile.k_position)
        high = (here - tile.lo).clamp(max=tile.k_position + tile.k_length - 1)
        some = low <= high
        seen[tile.row, of_q] += (high - low + 1).clamp(min=0).int()
        at_query[tile.row, of_q] = here.int()
        at_key[tile.row, of_k] = torch.arange(tile.k_position, tile.k_position + tile.k_length, device="cpu").int()
        low, high = low.masked_fill(~some, BEYOND).int(), high.masked_fill(~some, NOWHERE).int()
        first[tile.row, of_q] = torch.minimum(first[tile.row, of_q], low)
        last[tile.row, of_q] = torch.maximum(last[tile.row, of_q], high)
    sees = first <= last
    if not sees.any():
        return None
    ordered = at_key.sort(1).values
    between = torch.searchsorted(ordered, last, right=True) - torch.searchsorted(ordered, first)
    assert torch.equal(seen.long(), between.clamp(min=0)), "a hole: unsupported() should have refused it"

    other = sees.flatten().int().argmax()
    rows = torch.arange(batch, dtype=torch.int32, device="cpu")[:, None].expand(batch, tokens)
    arguments = [torch.where(sees, x, x.flatten()[other]) for x in (rows, at_query, first, last)]
    first, last, at_key = (x.to(device) for x in (first, last, at_key))
    row, query, low, high = (x.to(device).contiguous() for x in arguments)
    return MaskTable(first, last, at_key, row, query, low, high, _blocks(first, last, at_key))


def _blocks(first: Tensor, last: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes, for [B, 1, blocks of queries], counts and indices of the blocks of keys seen in part, and in full."""

    def edges(x: Tensor, fill: int) -> Tensor:
        missing = -x.shape[1] % BLOCK
        blocks: Tensor = torch.nn.functional.pad(x, (0, missing), value=fill).unflatten(1, (-1, BLOCK))
        return blocks

    some = (keys != NOWHERE).int()
    k_first = edges(keys.masked_fill(some == 0, BEYOND), BEYOND).amin(2)[:, None]
    k_last = edges(keys, NOWHERE).amax(2)[:, None]
    k_all = edges(some, 0).amin(2)[:, None]
    q_first, q_last = edges(first, BEYOND), edges(last, NOWHERE)
    any_seen = (k_first <= q_last.amax(2)[..., None]) & (k_last >= q_first.amin(2)[..., None])
    all_seen = (k_all == 1) & (k_first >= q_first.amax(2)[..., None]) & (k_last <= q_last.amin(2)[..., None])
    lists = []
    for blocks in (any_seen & ~all_seen, all_seen):
        chosen = blocks[:, None].int()
        lists += [chosen.sum(3).int(), chosen.argsort(dim=3, descending=True, stable=True).int()]
    return lists[0], lists[1], lists[2], lists[3]
