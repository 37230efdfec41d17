"""The keys that an indexer chose, as the kernels read them: bits of each query, in the order of the tensor of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...sharding.mask import Tile
from ..score_mods.chosen_keys import WORD, ChosenKeys
from .tables import places_on


@dataclass(frozen=True, eq=False)
class Choice:
    """The choice of one attention.

    Args:
        bits: [B, n, W] int32, as `chosen_keys.packed`, but a bit for each key of the tensor.
        q_rows: [B, T] int32, where a query's bits are in dim 1.
    """

    bits: Tensor
    q_rows: Tensor

    @classmethod
    def of(cls, function: ChosenKeys, q: Tensor, k: Tensor, tiles: Tensor) -> Choice:
        q_places, _, _ = places_on(tiles, q.device, q.shape[0], q.shape[1], k.shape[1])
        return cls(moved(function.bits, runs_of_keys(tiles), k.shape[1]), function.query_of[q_places.long()])

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the kernels, in the places of those of a `Bias`."""
        return self.bits, self.q_rows, self.q_rows, self.bits.shape[1], self.bits.shape[2]


class Keys(NamedTuple):
    """A run of a tensor of keys: ``length`` of them from ``offset`` on, from ``position`` of the row on."""

    offset: int
    position: int
    length: int

    @property
    def shift(self) -> int:
        """The distance of a key's place in the row from that in the tensor."""
        return self.position - self.offset


def runs_of_keys(tiles: Tensor) -> list[Keys]:
    """The runs of a tensor of keys that its tiles show; every batch row has the same."""
    found: list[Keys] = []
    for tile in sorted({(t.k_offset, t.k_position, t.k_length) for t in map(Tile._make, tiles.tolist())}):
        run, last = Keys(*tile), found[-1] if found else None
        if last is not None and run.offset <= last.offset + last.length and run.shift == last.shift:
            found[-1] = last._replace(length=max(last.length, run.offset + run.length - last.offset))
        else:
            found.append(run)
    return found


def moved(bits: Tensor, runs: list[Keys], keys: int) -> Tensor:
    """Bits by position in the row as bits by offset in a tensor of ``keys``: the same tensor where both are equal."""
    words = -(-keys // WORD)
    if all(run.shift == 0 for run in runs) and bits.shape[2] >= words:
        return bits
    found = bits.new_zeros(*bits.shape[:2], words)
    for run in runs:
        first, last = run.offset // WORD, (run.offset + run.length - 1) // WORD
        index = torch.arange(first, last + 1, device=bits.device) + run.shift // WORD
        rest, most = run.shift % WORD, bits.shape[2] - 1
        part = bits[..., index.clamp(0, most)]
        if rest:  # a word has the end of one and the beginning of the next; >> would repeat the sign
            after = bits[..., (index + 1).clamp(0, most)]
            part = ((part >> rest) & (2 ** (WORD - rest) - 1)) | (after << (WORD - rest))
        found[..., first : last + 1] |= part & _inside(run, first, last, bits.device)
    return found


def _inside(run: Keys, first: int, last: int, device: torch.device) -> Tensor:
    """[n] int32: words whose bits are 1 for the keys of a run."""
    at = torch.arange(first * WORD, (last + 1) * WORD, dtype=torch.int64, device="cpu")
    inside = ((at >= run.offset) & (at < run.offset + run.length)).view(-1, WORD).long()
    return (inside << torch.arange(WORD, device="cpu")).sum(1).to(torch.uint32).view(torch.int32).to(device)
