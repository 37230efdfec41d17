"""Layouts: which rank holds which token, sharding and merging.

A row of S tokens is padded to a multiple of 2W and cut into 2W chunks; rank r holds chunk r and chunk 2W-1-r, in
that order, so that every rank has the same share of a causal mask's work (Brandon et al. 2023, "Striped attention",
and the zigzag of ring-flash-attention). Packed documents may need other chunks: then the layout names the owner of each
(`balance` chooses). A ring of one holds the row as it is.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import check, check_dense, check_type, is_whole, whole_number
from ..errors import BadOption, BadShape, TwoLayouts

Owners = tuple[int, ...]
"""The rank that holds each chunk of a row, in order; () for the zigzag."""

LONGEST, MOST_RANKS = 2**40, 2**16
"""Most tokens and ranks. Larger numbers are mistakes."""


class Run(NamedTuple):
    """A contiguous run of tokens: ``length`` tokens at ``offset`` of a tensor, at ``position`` of the row."""

    offset: int
    position: int
    length: int


@dataclass(frozen=True)
class Layout:
    """The distribution of a row of ``length`` tokens over the ranks of a ring.

    Args:
        length: real tokens in the row (S).
        world_size: ranks in the ring (W).
        rank: this rank.
        owners: the rank that holds each of the row's equal chunks, each rank as many as every other; () is the zigzag.
    """

    length: int
    world_size: int
    rank: int
    owners: Owners = ()

    def __post_init__(self) -> None:
        whole_number("length", self.length, "a number of tokens, 0 to 2**40", most=LONGEST)
        whole_number("world_size", self.world_size, f"a number of ranks, 1 to {MOST_RANKS}", 1, MOST_RANKS)
        last = self.world_size - 1
        whole_number("rank", self.rank, f"from 0 to {last}", most=last)
        need = f"the ranks 0 to {last}, each as often as every other"
        check_type("owners", self.owners, tuple, need)
        even = all(map(is_whole, self.owners)) and _is_shared_evenly(self.owners, self.world_size)
        check(not self.owners or even, "owners", self.owners, need)

    @cached_property
    def chunks(self) -> int:
        """Chunks that each rank holds; a ring of one has a single chunk."""
        return 1 if self.world_size == 1 else len(self.owners) // self.world_size or 2

    @cached_property
    def chunk(self) -> int:
        """Tokens in a chunk."""
        return -(-self.length // (self.chunks * self.world_size))

    @cached_property
    def padded(self) -> int:
        """Tokens in the padded row."""
        return self.chunk * self.chunks * self.world_size

    @cached_property
    def local_length(self) -> int:
        """Tokens that every rank holds, padding included (T)."""
        return self.padded // self.world_size

    @cached_property
    def padding(self) -> list[int]:
        """The places among this rank's tokens of those that only pad the row."""
        return [int(place) for place in (self.positions() >= self.length).nonzero()]

    def runs(self, rank: int | None = None) -> tuple[Run, ...]:
        """The contiguous runs of tokens that ``rank`` (default: this one) holds, in its local order."""
        most = self.world_size - 1
        rank = self.rank if rank is None else whole_number("rank", rank, f"from 0 to {most}, or None", most=most)
        return _runs(chunks_of(self.world_size, self.owners)[rank], self.chunk)

    def held(self) -> int:
        """The number of real tokens that this rank holds."""
        return sum(max(0, min(run.length, self.length - run.position)) for run in self.runs())

    def whole(self) -> tuple[Run, ...]:
        """The padded row as one run: what a merged gather holds."""
        return (Run(0, 0, self.padded),)

    def positions(self, rank: int | None = None) -> Tensor:
        """[T] int64: the place in the padded row of each token that ``rank`` (default: this one) holds."""
        return torch.cat(
            [torch.arange(run.position, run.position + run.length, device="cpu") for run in self.runs(rank)]
        )

    def pad(self, row: Tensor, dim: int, value: float | int | bool | None = 0) -> Tensor:
        """``row`` with ``value`` appended along ``dim`` up to the padded length; None: its last token again."""
        tokens = _tokens(row, dim)
        missing = self.padded - tokens
        if missing < 0:
            raise BadShape("row", tuple(row.shape), f"it must have at most {self.padded} tokens along dim {dim}")
        if missing == 0:
            return row
        shape = list(row.shape)
        shape[dim] = missing
        try:
            more = row.narrow(dim, -1, 1).expand(shape) if value is None else row.new_full(shape, value)
        except (TypeError, OverflowError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise BadOption("value", value, f"a number that {row.dtype} holds; None for a row with tokens") from error
        return torch.cat([row, more], dim)

    def shard(self, row: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a padded row: its chunks along ``dim``, copied; in a ring of one the row itself."""
        if _tokens(row, dim) != self.padded:
            raise BadShape("row", tuple(row.shape), f"it must have {self.padded} tokens along dim {dim}: see `pad`")
        if self.world_size == 1:
            return row
        return torch.cat([row.narrow(dim, run.position, run.length) for run in self.runs()], dim)

    def merge(self, gathered: Tensor) -> Tensor:
        """The padded row from all ranks' tokens: [W, B, T, ...] in rank order to [B, W * T, ...] in row order."""
        check_dense("gathered", gathered)
        need = f"it must be [{self.world_size}, B, {self.local_length}, ...]"
        if gathered.dim() < 3 or (gathered.shape[0], gathered.shape[2]) != (self.world_size, self.local_length):
            raise BadShape("gathered", tuple(gathered.shape), need)
        if self.world_size == 1:
            return gathered[0]
        pieces = gathered.unflatten(2, (self.chunks, gathered.shape[2] // self.chunks))
        return torch.cat([pieces[rank, :, number] for rank, number in _places(self.world_size, self.owners)], 1)

    def split(self, row: Tensor) -> Tensor:
        """The inverse of `merge`: [B, W * T, ...] in row order to [W, B, T, ...] in rank order."""
        if _tokens(row, 1) != self.padded:
            raise BadShape("row", tuple(row.shape), f"it must have {self.padded} tokens along dim 1: see `pad`")
        if self.world_size == 1:
            return row[None]
        batch, tokens, *rest = row.shape
        held = _held(self.world_size, self.owners, row.device)
        pieces = row.unflatten(1, (self.chunks * self.world_size, self.chunk)).index_select(1, held)
        of_ranks: Tensor = pieces.view(batch, self.world_size, tokens // self.world_size, *rest)
        return of_ranks.transpose(0, 1).contiguous()


@lru_cache(maxsize=1024)
def chunks_of(world_size: int, owners: Owners) -> tuple[tuple[int, ...], ...]:
    """The chunks of the row that rank 0, 1, ... holds, in their order in the row."""
    if world_size == 1:
        return ((0,),)
    if not owners:
        return tuple((rank, 2 * world_size - 1 - rank) for rank in range(world_size))
    return tuple(tuple(chunk for chunk, of in enumerate(owners) if of == rank) for rank in range(world_size))


@lru_cache(maxsize=1024)
def _runs(chunks: tuple[int, ...], length: int) -> tuple[Run, ...]:
    """The contiguous runs of these chunks of the row, of ``length`` tokens each."""
    runs = [Run(0, 0, 0)]
    for number, place in enumerate(chunks):
        last = runs[-1]
        if last.position + last.length == place * length:  # chunks that touch are one run
            runs[-1] = last._replace(length=last.length + length)
        else:
            runs.append(Run(number * length, place * length, length))
    return tuple(run for run in runs if run.length) or (Run(0, 0, 0),)


@lru_cache(maxsize=1024)
def _is_shared_evenly(owners: Owners, world_size: int) -> bool:
    counts = {owners.count(rank) for rank in range(world_size)}
    return counts == {len(owners) // world_size} and len(owners) % world_size == 0


@lru_cache(maxsize=256)
def _held(world_size: int, owners: Owners, device: torch.device) -> Tensor:
    """The chunks of rank 0, then those of rank 1, ..."""
    with torch.inference_mode(False):  # cached for calls that autograd may record
        return torch.tensor(chunks_of(world_size, owners), device=device).flatten()


@lru_cache(maxsize=256)
def _places(world_size: int, owners: Owners) -> tuple[tuple[int, int], ...]:
    """The owner of each chunk of the row, and the chunk's index among the owner's."""
    places = sorted(
        (chunk, rank, number)
        for rank, held in enumerate(chunks_of(world_size, owners))
        for number, chunk in enumerate(held)
    )
    return tuple((rank, number) for _, rank, number in places)


def _tokens(row: Tensor, dim: int) -> int:
    """The number of tokens of a row along ``dim``."""
    check_dense("row", row)
    if not is_whole(dim, -row.dim(), row.dim() - 1):
        raise BadOption("dim", dim, f"a dim of the row, which has {row.dim()}")
    return row.shape[dim]


_BALANCED: dict[int, weakref.WeakSet[Any]] = {}
"""Live objects with rows in another layout than the zigzag, by ring size."""


def note_balanced(holder: object, world_size: int) -> None:
    """Records that ``holder`` has rows in another layout than the zigzag, on a ring of this size."""
    _BALANCED.setdefault(world_size, weakref.WeakSet()).add(holder)


def positions(length: int, *, rank: int, world_size: int) -> Tensor:
    """Returns the tokens of a row that a rank holds in the zigzag layout, the default of `ring_attention` and `shard`.

    For a sharded batch use `Sharded.positions`, which is right in every layout.

    ``row[:, positions(S, rank=r, world_size=W)]`` is rank r's shard of ``row`` [B, S, ...]. If S is no multiple of
    2 * W the last chunks are short, so ranks may hold different numbers of tokens, or none; together they hold every
    token once.

    Args:
        length: tokens in the row (S), 0 or more.
        rank: 0 to world_size - 1.
        world_size: ranks in the ring (W).

    Returns:
        1-D int64 index into the row, each entry below ``length``, in the order in which the rank holds them.

    Raises:
        BadOption: a rank outside the ring, or an impossible length or size.
        TwoLayouts: this process has a batch of a ring of this size in another layout: ``layout="balanced"`` of
            `RingConfig`, or the default of Trainer.
    """
    layout = Layout(length, world_size, rank)
    if _BALANCED.get(world_size):
        raise TwoLayouts(world_size)
    index = layout.positions()
    return index[index < length]
