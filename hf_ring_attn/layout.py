"""Who holds which token: zigzag positions, sharding, and back.

A row of S tokens is padded to a multiple of 2W and cut into 2W chunks; rank r holds chunk r and chunk 2W-1-r, in
that order, so that every rank has the same share of a causal mask's work (Brandon et al. 2023, "Striped attention",
and the zigzag of ring-flash-attention). A ring of one holds the row as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import BadOption


class Run(NamedTuple):
    """A contiguous run of tokens: ``length`` tokens at ``offset`` of a tensor, at ``position`` of the row."""

    offset: int
    position: int
    length: int


@dataclass(frozen=True)
class Layout:
    """How a row of ``length`` tokens lies on the ranks of a ring.

    Args:
        length: real tokens in the row (S).
        world_size: ranks in the ring (W).
        rank: the rank that asks.
    """

    length: int
    world_size: int
    rank: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise BadOption("length", self.length, "a number of tokens, 0 or more")
        if self.world_size < 1:
            raise BadOption("world_size", self.world_size, "at least 1")
        if not 0 <= self.rank < self.world_size:
            raise BadOption("rank", self.rank, f"from 0 to {self.world_size - 1}")

    @property
    def chunk(self) -> int:
        """Tokens in a chunk; a ring of one has a single chunk."""
        return self.length if self.world_size == 1 else -(-self.length // (2 * self.world_size))

    @property
    def padded(self) -> int:
        """Tokens in the padded row."""
        return self.length if self.world_size == 1 else self.chunk * 2 * self.world_size

    @property
    def local_length(self) -> int:
        """Tokens that every rank holds, padding included (T)."""
        return self.padded // self.world_size

    def runs(self, rank: int | None = None) -> tuple[Run, ...]:
        """The contiguous runs of tokens that ``rank`` (default: this one) holds, in its local order."""
        rank = self.rank if rank is None else rank
        if self.world_size == 1:
            return (Run(0, 0, self.length),)
        chunk, last = self.chunk, 2 * self.world_size - 1 - rank
        if last == rank + 1:  # the two chunks of the last rank touch: one run
            return (Run(0, rank * chunk, 2 * chunk),)
        return (Run(0, rank * chunk, chunk), Run(chunk, last * chunk, chunk))

    def whole(self) -> tuple[Run, ...]:
        """The padded row as one run: what a merged gather holds."""
        return (Run(0, 0, self.padded),)

    def positions(self, rank: int | None = None) -> Tensor:
        """[T] int64: the place in the padded row of each token that ``rank`` (default: this one) holds."""
        return torch.cat([torch.arange(run.position, run.position + run.length) for run in self.runs(rank)])

    def pad(self, row: Tensor, dim: int, value: float | int | bool = 0) -> Tensor:
        """``row`` with ``value`` appended along ``dim`` up to the padded length."""
        missing = self.padded - row.shape[dim]
        if missing == 0:
            return row
        shape = list(row.shape)
        shape[dim] = missing
        return torch.cat([row, row.new_full(shape, value)], dim)

    def shard(self, row: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a padded row: its chunks along ``dim``, copied; in a ring of one the row itself."""
        if self.world_size == 1:
            return row
        return torch.cat([row.narrow(dim, run.position, run.length) for run in self.runs()], dim)

    def merge(self, gathered: Tensor) -> Tensor:
        """The padded row from all ranks' tokens: [W, B, T, ...] in rank order to [B, W * T, ...] in row order."""
        if self.world_size == 1:
            return gathered[0]
        ranks, batch, tokens, *rest = gathered.shape
        chunk = tokens // 2
        halves = gathered.view(ranks, batch, 2, chunk, *rest)
        row = gathered.new_empty(batch, 2, ranks, chunk, *rest)
        row[:, 0] = halves[:, :, 0].transpose(0, 1)
        row[:, 1] = halves[:, :, 1].transpose(0, 1).flip(1)
        return row.view(batch, ranks * tokens, *rest)

    def split(self, row: Tensor) -> Tensor:
        """The opposite of `merge`: [B, W * T, ...] in row order to [W, B, T, ...] in rank order."""
        if self.world_size == 1:
            return row[None]
        batch, tokens, *rest = row.shape
        halves = row.view(batch, 2, self.world_size, self.chunk, *rest)
        ranks = row.new_empty(self.world_size, batch, 2, self.chunk, *rest)
        ranks[:, :, 0] = halves[:, 0].transpose(0, 1)
        ranks[:, :, 1] = halves[:, 1].flip(1).transpose(0, 1)
        return ranks.view(self.world_size, batch, tokens // self.world_size, *rest)


def positions(length: int, *, rank: int, world_size: int) -> Tensor:
    """Which tokens of a row a rank holds.

    ``row[:, positions(S, rank=r, world_size=W)]`` is rank r's share of ``row`` [B, S, ...]. Where S is no multiple of
    2 * W the last chunks are short, so ranks may hold different numbers of tokens, or none; together they hold every
    token once.

    Args:
        length: tokens in the row (S), 0 or more.
        rank: 0 to world_size - 1.
        world_size: ranks in the ring (W).

    Returns:
        1-D int64 index into the row, each entry below ``length``, in the order in which the rank holds them.

    Raises:
        BadOption: for a rank outside the ring or a negative length.
    """
    index = Layout(length, world_size, rank).positions()
    return index[index < length]
