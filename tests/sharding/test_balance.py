"""Packed rows: which chunks ranks hold, how evenly that shares the work, and that nothing else changes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hf_ring_attn.bench.workload import visible_pairs
from hf_ring_attn.sharding import balance
from hf_ring_attn.sharding.balance import ACCEPTABLE_PERCENT, CHUNKS, LEAST_CHUNK, balanced
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask, tiles

LENGTH = 16384
PACKED: dict[str, list[int]] = {
    "two halves": [8192, 8192],
    "one document and many small ones": [9000, *[56] * 131, 48],
    "documents as long as a rank's share": [2048] * 8,
    "documents a little longer than that": [2340] * 7,
    "one after the other, longer and longer": [100 * n for n in range(1, 18)],
    "a row that is not filled": [5000, 3000, 500],
}


def ids(*rows: list[int], length: int = LENGTH) -> Tensor:
    """[B, S] ids, -1 where a row is not filled."""
    found = torch.full((len(rows), length), -1)
    for row, sizes in zip(found, rows, strict=True):
        for number, (start, size) in enumerate(zip([sum(sizes[:n]) for n in range(len(sizes))], sizes, strict=True)):
            row[start : start + size] = number
    return found


def share(documents: Tensor, layout: Layout) -> float:
    """The largest share of visible pairs over the mean, counted from tiles."""
    size = layout.world_size
    everyone = [Layout(layout.length, size, rank, layout.owners) for rank in range(size)]
    mask = Mask.of(CAUSAL, len(documents), layout.padded, layout.pad(documents, 1, -1))
    work = [visible_pairs(tiles(mask, one.runs(), one.whole())) for one in everyone]
    return max(work) * size / sum(work)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("why", PACKED)
def test_every_rank_has_about_the_same_work(why: str, size: int) -> None:
    documents = ids(PACKED[why])
    zigzag = Layout(LENGTH, size, size - 1)
    chosen = balanced(documents, zigzag)
    before, after = share(documents, zigzag), share(documents, chosen)
    assert after <= ACCEPTABLE_PERCENT / 100
    assert (chosen == zigzag) == (before <= ACCEPTABLE_PERCENT / 100)


def test_that_a_zigzag_alone_would_not_do() -> None:
    worst = max(share(ids(sizes), Layout(LENGTH, 8, 0)) for sizes in PACKED.values())
    assert worst > 2


def test_a_batch_has_one_layout_for_the_work_of_all_its_rows() -> None:
    documents = ids(PACKED["one document and many small ones"], PACKED["a row that is not filled"])
    chosen = balanced(documents, Layout(LENGTH, 4, 1))
    assert chosen.owners
    assert share(documents, chosen) <= ACCEPTABLE_PERCENT / 100 < share(documents, Layout(LENGTH, 4, 1))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_document_keeps_the_zigzag(size: int) -> None:
    for length in (LENGTH, LENGTH - 5):
        zigzag = Layout(length, size, 0)
        assert balanced(torch.zeros(2, length, dtype=torch.int64), zigzag) == zigzag


def test_what_cannot_be_better_stays() -> None:
    for documents in (ids([], [], length=64), ids([40, 24], length=64)):
        assert balanced(documents, Layout(64, 2, 0)) == Layout(64, 2, 0)
    assert balanced(ids([40, 24], length=64), Layout(64, 1, 0)) == Layout(64, 1, 0)


def test_ranks_choose_the_same() -> None:
    documents = ids(PACKED["a row that is not filled"])
    (owners,) = {balanced(documents, Layout(LENGTH, 8, rank)).owners for rank in range(8)}
    assert owners


def test_no_chunk_is_smaller_than_a_block_and_the_fewest_that_do_are_taken() -> None:
    """Rows drawn at random; with smaller numbers of chunks allowed the choice stays, or has more of them."""
    draw, seen = random.Random(0), set()
    for _ in range(60):
        size, length = draw.choice([2, 4, 8]), draw.choice([2048, 4096, LENGTH, LENGTH - 77])
        cuts = sorted(draw.sample(range(1, length), draw.randint(1, 12)))
        documents = ids([b - a for a, b in pairwise([0, *cuts, length])], length=length)
        chosen = balanced(documents, Layout(length, size, 0))
        assert chosen.chunk >= LEAST_CHUNK or not chosen.owners
        if chosen.owners:
            seen.add(chosen.chunks)
            fewer = [n for n in CHUNKS if n < chosen.chunks]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(balance, "CHUNKS", fewer)
                other = balanced(documents, Layout(length, size, 0))
            best = share(documents, other)
            assert best > share(documents, chosen)
            assert best > ACCEPTABLE_PERCENT / 100
    assert {2, 4, 8} <= seen


def test_without_padding_only_chunks_that_divide_the_row() -> None:
    length = 2 * 2 * 1001  # no multiple of 8
    documents = ids([3000, *[20] * 50, 4], length=length)
    free, bound = (balanced(documents, Layout(length, 2, 0), pad) for pad in (True, False))
    assert bound.padded == length < free.padded
    assert share(documents, free) < share(documents, bound)
