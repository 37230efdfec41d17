"""Tiles against a dense mask: every visible pair in exactly one tile, and no tile larger than what is visible in it."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_ring_attn.sharding.layout import Layout, Run
from hf_ring_attn.sharding.mask import BIDIRECTIONAL, CAUSAL, UNBOUNDED, Band, Mask, Segment, Tile, tiles

MOST = 40
"""Tokens of the longest random row."""

bounds = st.one_of(st.none(), st.integers(-MOST - 2, MOST + 2))


@st.composite
def bands(draw: st.DrawFn) -> Band:
    """Any band, empty ones too."""
    lo, hi = draw(bounds), draw(bounds)
    return Band(-UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi)


def rows(draw: st.DrawFn, batch: int, length: int) -> Tensor:
    """[B, S] ids: runs of a few tokens, in which ids may come back later, and -1 for padding."""
    table = []
    for _ in range(batch):
        ids: list[int] = []
        while len(ids) < length:
            ids += [draw(st.integers(-1, 3))] * draw(st.integers(1, 12))
        table.append(ids[:length])
    return torch.tensor(table, dtype=torch.int64).view(batch, length)


def runs_of(draw: st.DrawFn, length: int) -> list[Run]:
    """Some runs of a row in any order, side by side in a tensor."""
    cuts = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
    parts = draw(st.permutations(list(pairwise(cuts))))
    runs, offset = [], 0
    for start, stop in parts[: draw(st.integers(0, len(parts)))]:
        runs.append(Run(offset, start, stop - start))
        offset += stop - start
    return runs


@st.composite
def problems(draw: st.DrawFn) -> tuple[Band, Tensor | None, Tensor | None, int, int]:
    """band, documents, hidden, batch, length."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(0, MOST))
    documents = rows(draw, batch, length) if draw(st.booleans()) else None
    hidden = rows(draw, batch, length) < 1 if draw(st.booleans()) else None
    return draw(bands()), documents, hidden, batch, length


@st.composite
def problems_in_runs(draw: st.DrawFn) -> tuple[Mask, Tensor, list[Run], list[Run]]:
    """A mask, the same mask dense, and the runs of its queries and keys."""
    band, documents, hidden, batch, length = draw(problems())
    mask = Mask.of(band, batch, length, documents, hidden)
    return mask, dense(band, documents, hidden, batch, length), runs_of(draw, length), runs_of(draw, length)


def dense(band: Band, documents: Tensor | None, hidden: Tensor | None, batch: int, length: int) -> Tensor:
    """[B, S, S] bool from the definition."""
    place = torch.arange(length)
    distance = place[:, None] - place[None]
    seen = ((distance >= band.lo) & (distance <= band.hi)).expand(batch, -1, -1)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None]) & (documents >= 0)[:, None]
    if hidden is not None:
        seen = seen & ~hidden[:, None]
    return seen


def places(runs: list[Run]) -> list[int]:
    return [run.position + i for run in runs for i in range(run.length)]


def pairs(tile: Tile) -> Tensor:
    """[q_length, k_length] bool: what a kernel makes of a tile."""
    distance = tile.q_position + torch.arange(tile.q_length)[:, None] - tile.k_position - torch.arange(tile.k_length)
    return (distance >= tile.lo) & (distance <= tile.hi)


def covered(table: Tensor, batch: int, queries: int, keys: int) -> Tensor:
    """[B, T, S] int64: in how many tiles each pair of the tensors of queries and keys is visible."""
    count = torch.zeros(batch, queries, keys, dtype=torch.int64)
    for line in table.tolist():
        tile = Tile(*line)
        queries_of = count[tile.row].narrow(0, tile.q_offset, tile.q_length)
        queries_of.narrow(1, tile.k_offset, tile.k_length).add_(pairs(tile))
    return count


def expected(seen: Tensor, queries: list[int], keys: list[int]) -> Tensor:
    return seen[:, queries][:, :, keys].long()


@settings(max_examples=400, deadline=None)
@given(problems_in_runs())
def test_every_visible_pair_is_in_exactly_one_tile(problem: tuple[Mask, Tensor, list[Run], list[Run]]) -> None:
    mask, seen, queries, keys = problem
    q, k = places(queries), places(keys)
    assert torch.equal(covered(tiles(mask, queries, keys), len(seen), len(q), len(k)), expected(seen, q, k))


@settings(max_examples=400, deadline=None)
@given(problems_in_runs())
def test_tiles_are_cut_to_what_is_visible(problem: tuple[Mask, Tensor, list[Run], list[Run]]) -> None:
    mask, _, queries, keys = problem
    for line in tiles(mask, queries, keys).tolist():
        seen = pairs(Tile(*line))
        assert seen.numel() > 0
        assert seen[0].any() and seen[-1].any() and seen[:, 0].any() and seen[:, -1].any()


@settings(max_examples=200, deadline=None)
@given(problems_in_runs())
def test_tiles_stand_where_their_tokens_are_and_in_order(problem: tuple[Mask, Tensor, list[Run], list[Run]]) -> None:
    mask, _, queries, keys = problem
    q, k = places(queries), places(keys)
    table = [Tile(*line) for line in tiles(mask, queries, keys).tolist()]
    for tile in table:
        assert q[tile.q_offset : tile.q_offset + tile.q_length] == [tile.q_position + i for i in range(tile.q_length)]
        assert k[tile.k_offset : tile.k_offset + tile.k_length] == [tile.k_position + i for i in range(tile.k_length)]
    order = [(tile.row, tile.q_offset, tile.k_offset) for tile in table]
    assert order == sorted(order) or q != sorted(q) or k != sorted(k)


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([1, 2, 3, 4, 8]))
def test_the_ranks_of_a_ring_cover_the_mask_together(
    problem: tuple[Band, Tensor | None, Tensor | None, int, int], world_size: int
) -> None:
    """Both passes: queries against the gathered row, and queries against each rank's keys in turn."""
    band, documents, hidden, batch, length = problem
    everyone = [Layout(length, world_size, rank) for rank in range(world_size)]
    padded = everyone[0].padded
    if padded > length:
        documents = torch.zeros(batch, length, dtype=torch.int64) if documents is None else documents
        documents = everyone[0].pad(documents, 1, -1)
        hidden = None if hidden is None else everyone[0].pad(hidden, 1, False)
    mask, seen = Mask.of(band, batch, padded, documents, hidden), dense(band, documents, hidden, batch, padded)
    assert not seen[:, length:].any() and not seen[:, :, length:].any()
    for layout in everyone:
        mine, held = layout.runs(), layout.positions().tolist()
        gathered = covered(tiles(mask, mine, layout.whole()), batch, len(held), padded)
        assert torch.equal(gathered, expected(seen, held, list(range(padded))))
        for source in everyone:
            theirs = source.positions().tolist()
            table = tiles(mask, mine, source.runs())
            assert torch.equal(covered(table, batch, len(held), len(theirs)), expected(seen, held, theirs))


def test_empty_rectangles_are_left_out() -> None:
    halves = [Run(0, 0, 8), Run(8, 8, 8)]
    assert len(tiles(Mask.of(CAUSAL, 1, 16), halves, halves)) == 3
    assert len(tiles(Mask.of(BIDIRECTIONAL, 1, 16), halves, halves)) == 4
    assert len(tiles(Mask.of(Band(0, 3), 1, 16), [Run(0, 12, 4)], halves)) == 1
    assert tiles(Mask.of(CAUSAL, 2, 16), halves[:1], halves[1:]).shape == (0, 9)
    assert tiles(Mask.of(CAUSAL, 1, 16, torch.full((1, 16), -1)), halves, halves).shape == (0, 9)


def test_a_band_in_which_nothing_lies_has_no_tiles() -> None:
    assert tiles(Mask.of(Band(2, 0), 1, 16), [Run(0, 0, 16)], [Run(0, 0, 16)]).shape == (0, 9)
    assert tiles(Mask.of(CAUSAL & Band(hi=-1), 1, 16), [Run(0, 0, 16)], [Run(0, 0, 16)]).shape == (0, 9)


def test_a_window_bounds_the_work() -> None:
    """Queries of a late chunk meet only the keys that a window of three lets them see."""
    (line,) = tiles(Mask.of(Band(0, 2), 1, 64), [Run(0, 32, 8)], [Run(0, 0, 64)]).tolist()
    assert Tile(*line) == Tile(0, 0, 8, 32, 30, 10, 30, 0, 2)


def test_tables_are_int64_on_the_host() -> None:
    table = tiles(Mask.of(CAUSAL, 2, 4), [Run(0, 0, 4)], [Run(0, 0, 4)])
    assert table.dtype == torch.int64
    assert table.device.type == "cpu"
    assert table.tolist() == [[row, 0, 4, 0, 0, 4, 0, 0, UNBOUNDED] for row in range(2)]


def test_masks_are_values() -> None:
    """Equal masks are equal and hash alike, so that a plan can be kept for the next batch."""
    documents = torch.tensor([[0, 0, 1, -1], [5, 5, 5, 5]])
    mask = Mask.of(CAUSAL, 2, 4, documents)
    assert mask == Mask.of(CAUSAL, 2, 4, documents.clone())
    assert hash(mask) == hash(Mask.of(CAUSAL, 2, 4, documents.clone()))
    assert mask != Mask.of(CAUSAL, 2, 4, documents.flip(0))
    assert mask.terms[0][1][0] == (((Segment(0, 2, 0), Segment(2, 3, 1)),) * 2)
    assert Mask.of(CAUSAL, 2, 4, torch.zeros(2, 4, dtype=torch.int64)) == Mask.of(CAUSAL, 2, 4)


def test_hidden_keys_keep_their_queries() -> None:
    """What a 2-D padding mask means in transformers: nobody sees the token, and it sees the others."""
    hidden = torch.tensor([[True, False, False]])
    table = tiles(Mask.of(CAUSAL, 1, 3, hidden=hidden), [Run(0, 0, 3)], [Run(0, 0, 3)])
    assert covered(table, 1, 3, 3)[0].tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]
    left = tiles(Mask.of(BIDIRECTIONAL, 1, 3, hidden=hidden), [Run(0, 0, 3)], [Run(0, 0, 3)])
    assert covered(left, 1, 3, 3)[0].tolist() == [[0, 1, 1]] * 3


def test_bands_meet_in_the_tighter_bounds() -> None:
    assert CAUSAL & Band(-3, 7) == Band(0, 7)
    assert BIDIRECTIONAL & CAUSAL == CAUSAL
