"""The keys that an indexer chose, as the kernels read them: bits of each query, by the place of a key in the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..score_mods.chosen_keys import ChosenKeys
from .tables import places_on


@dataclass(frozen=True, eq=False)
class Choice:
    """The choice of one attention.

    Args:
        bits: [B, n, W] int32, as `chosen_keys.packed`.
        q_rows: [B, T] int32, where a query's bits are in dim 1. k_places: [B, S] int32, positions of keys in the row.
    """

    bits: Tensor
    q_rows: Tensor
    k_places: Tensor

    @classmethod
    def of(cls, function: ChosenKeys, q: Tensor, k: Tensor, tiles: Tensor) -> Choice:
        q_places, k_places, _ = places_on(tiles, q.device, q.shape[0], q.shape[1], k.shape[1])
        return cls(function.bits, function.query_of[q_places.long()], k_places)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the kernels, in the places of those of a `Bias`."""
        return self.bits, self.q_rows, self.k_places, self.bits.shape[1], self.bits.shape[2]
