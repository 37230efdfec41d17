"""Attention to chosen keys only, as DeepSeek's sparse attention (DSA) has it: a choice as a function of scores.

An indexer chooses some keys for each query. Here the choice is one bit per query and key of the whole row, on the rank
that holds the query, and a score_mod that gives -inf to all other scores. So every kernel that serves a score_mod
serves it, in both passes, and a query attends to the chosen keys among those that its mask shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .score_mod import ScoreMod

WORD = 32
"""Keys in one integer."""
MOST_BYTES = 2**28
"""Bytes of the unpacked choice of the queries that are packed at once."""


def packed(chosen: Tensor, keys: int) -> Tensor:
    """[B, T, W] int32: bit ``key % 32`` of word ``key // 32`` is 1 for a chosen key.

    Args:
        chosen: [B, T, n] integers, the positions of chosen keys in a row of ``keys``, in any order; -1 for none.
    """
    batch, queries = chosen.shape[:2]
    words = -(-keys // WORD)
    bits = torch.empty(batch, queries, words, dtype=torch.int32, device=chosen.device)
    places = torch.arange(8, dtype=torch.uint8, device=chosen.device)
    at_once = max(1, MOST_BYTES // max(1, batch * words * WORD))
    for first in range(0, queries, at_once):
        mine = slice(first, first + at_once)
        flags = is_chosen(chosen[:, mine], words * WORD).view(torch.uint8)
        octets = flags.unflatten(2, (-1, 8)).bitwise_left_shift_(places).sum(3, dtype=torch.uint8)
        bits[:, mine] = octets.view(torch.int32)
    return bits


def is_chosen(chosen: Tensor, keys: int) -> Tensor:
    """[B, T, keys] bool of ``chosen`` as in `packed`."""
    flags = torch.zeros(*chosen.shape[:2], keys + 1, dtype=torch.bool, device=chosen.device)
    at = chosen.long()
    return flags.scatter_(2, at.masked_fill(at < 0, keys), True)[..., :keys].contiguous()


class ChosenKeys:
    """A score_mod that leaves the scores of chosen keys as they are, and makes those of others -inf.

    Args:
        chosen: as in `packed`, for this rank's queries.
        places: [T] int64, their positions in the row. keys: the row's tokens, with padding.
    """

    def __init__(self, chosen: Tensor, places: Tensor, keys: int) -> None:
        self.bits = packed(chosen, keys)
        of_row = torch.zeros(keys, dtype=torch.int32, device=chosen.device)
        of_row[places] = torch.arange(len(places), dtype=torch.int32, device=chosen.device)
        self.query_of = of_row

    def mod(self, deterministic: bool = False) -> ScoreMod:
        """Describes it to the kernels."""
        fixed = self.bits, self.query_of
        return ScoreMod(self, deterministic=deterministic, device=self.bits.device, fixed=fixed, text="chosen keys")

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        word = self.bits[b, self.query_of[q_idx], kv_idx // WORD]
        return torch.where((word >> (kv_idx % WORD)) & 1 == 1, score, -torch.inf)
