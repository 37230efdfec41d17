"""Load balance of packed rows: assigns chunks to ranks so that all have about the same work.

A zigzag balances one document's causal mask, but not several: with documents as long as a rank's shard, one rank can
have 2.3 times the mean work (recipes/results has the table). There, chunks are assigned greedily, the largest first,
each to the rank with the least work so far (Graham 1969, "Bounds on multiprocessing timing anomalies"). Every rank gets
the same number of chunks, since T must be equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import Layout, Owners, chunks_of

ACCEPTABLE_PERCENT = 110
"""A layout is good enough if no rank has more work than this percentage of the mean. More and smaller chunks come
closer to 100, but spread a document over more ranks, so more keys are sent."""

CHUNKS = (2, 4, 8, 16)
"""Chunks per rank that are tried."""

LEAST_CHUNK = 128
"""Fewest tokens in a chunk: a kernel's block. Rows that would need smaller ones cost little anyway."""


def balanced(documents: Tensor, layout: Layout, pad: bool = True) -> Layout:
    """Returns the layout of packed rows: the zigzag if good enough; else the fewest chunks that are, or the best.

    Computed in integers from the arguments alone, so that every rank chooses the same.

    Args:
        documents: [B, S] ids on the CPU, -1 for tokens that see nothing. A batch has one layout, so the work of its
            rows is summed.
        layout: the zigzag.
        pad: rows may be padded, as more than two chunks per rank can need.
    """
    work = _work_before(documents)
    size, total = layout.world_size, int(work[-1])
    if size == 1 or total == 0:
        return layout
    tried = [(_most(layout, _by_chunk(work, layout)), layout)]
    for chunks in CHUNKS:
        if 100 * size * tried[-1][0] <= ACCEPTABLE_PERCENT * total:
            return tried[-1][1]
        # Owners of this number of chunks, for their size only
        other = Layout(layout.length, size, layout.rank, tuple(range(size)) * chunks)
        if other.chunk < LEAST_CHUNK or not (pad or other.padded == layout.length):
            continue
        by_chunk = _by_chunk(work, other)
        other = Layout(layout.length, size, layout.rank, _assigned(by_chunk, size))
        tried.append((_most(other, by_chunk), other))
    return min(tried, key=lambda one: one[0])[1]


def _work_before(documents: Tensor) -> Tensor:
    """[S + 1]: keys seen by all queries before each token, summed over rows, under a causal mask."""
    rows, length = documents.shape
    places = torch.arange(length, device="cpu")
    begins = torch.ones(rows, length, dtype=torch.bool, device="cpu")
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    seen = places + 1 - (places * begins).cummax(1).values
    return torch.nn.functional.pad(seen.masked_fill_(documents < 0, 0).sum(0).cumsum(0), (1, 0))


def _by_chunk(work_before: Tensor, layout: Layout) -> list[int]:
    """The work of each chunk of the row."""
    bounds = torch.arange(layout.chunks * layout.world_size + 1, device="cpu") * layout.chunk
    by_chunk: list[int] = work_before[bounds.clamp_(max=layout.length)].diff().tolist()
    return by_chunk


def _most(layout: Layout, by_chunk: list[int]) -> int:
    """The work of the most loaded rank."""
    return max(sum(by_chunk[chunk] for chunk in held) for held in chunks_of(layout.world_size, layout.owners))


def _assigned(by_chunk: list[int], size: int) -> Owners:
    each = len(by_chunk) // size
    owners, loads, counts = [0] * len(by_chunk), [0] * size, [0] * size
    for chunk in sorted(range(len(by_chunk)), key=lambda chunk: -by_chunk[chunk]):
        rank = min((rank for rank in range(size) if counts[rank] < each), key=loads.__getitem__)
        owners[chunk] = rank
        loads[rank] += by_chunk[chunk]
        counts[rank] += 1
    return tuple(owners)
