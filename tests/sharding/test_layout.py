"""Who holds which token: every token once, there and back again, and the work of a causal mask shared evenly."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ring_attn.errors import BadOption
from hf_ring_attn.sharding.layout import Layout, Run, positions
from tests.helpers.rank_functions import held

lengths = st.integers(0, 200)
sizes = st.integers(1, 9)
patient = settings(deadline=None)  # on a shared machine time says nothing


def layouts(length: int, world_size: int) -> list[Layout]:
    return [Layout(length, world_size, rank) for rank in range(world_size)]


@st.composite
def dealt(draw: st.DrawFn) -> list[Layout]:
    """All ranks' layouts of a row whose chunks are dealt at random, as many to each rank."""
    world_size = draw(st.integers(1, 5))
    owners = draw(st.permutations(list(range(world_size)) * draw(st.integers(1, 5))))
    length = draw(lengths)
    return [Layout(length, world_size, rank, tuple(owners)) for rank in range(world_size)]


def row_of(layout: Layout, batch: int = 2) -> torch.Tensor:
    """A padded row that says at each place which place it is: [B, padded, 3]."""
    return torch.arange(batch * layout.padded * 3).view(batch, layout.padded, 3)


@patient
@given(lengths, sizes)
def test_every_token_is_held_once_and_where_zigzag_puts_it(length: int, world_size: int) -> None:
    shares = [positions(length, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert all(torch.equal(share, held(length, rank, world_size)) for rank, share in enumerate(shares))
    assert torch.cat(shares).sort().values.tolist() == list(range(length))


@patient
@given(lengths, sizes)
def test_the_padded_row_is_the_least_multiple_and_is_held_once(length: int, world_size: int) -> None:
    unit = 1 if world_size == 1 else 2 * world_size
    for layout in layouts(length, world_size):
        assert layout.padded % unit == 0
        assert length <= layout.padded < length + unit
        assert layout.local_length * world_size == layout.padded
    everyone = torch.cat([layout.positions() for layout in layouts(length, world_size)])
    assert everyone.sort().values.tolist() == list(range(layout.padded))


@patient
@given(lengths, sizes)
def test_runs_are_the_positions_in_local_order(length: int, world_size: int) -> None:
    for layout in layouts(length, world_size):
        runs = layout.runs()
        assert [offset for run in runs for offset in range(run.offset, run.offset + run.length)] == list(
            range(layout.local_length)
        )
        apart = all(a.position + a.length < b.position for a, b in pairwise(runs))
        assert apart or length == 0, "runs that touch are one run"
        places = [place for run in runs for place in range(run.position, run.position + run.length)]
        assert places == layout.positions().tolist() == Layout(length, world_size, 0).positions(layout.rank).tolist()
        assert layout.whole() == (Run(0, 0, layout.padded),)


@patient
@given(lengths, sizes)
def test_shards_merge_to_the_row_and_split_is_the_way_back(length: int, world_size: int) -> None:
    everyone = layouts(length, world_size)
    row = row_of(everyone[0])
    shards = torch.stack([layout.shard(row, 1) for layout in everyone])
    for layout in everyone:
        assert torch.equal(shards[layout.rank], row[:, layout.positions()])
        assert torch.equal(layout.merge(shards), row)
        assert torch.equal(layout.split(row), shards)


@patient
@given(dealt())
def test_chunks_dealt_otherwise_are_held_once_too(everyone: list[Layout]) -> None:
    row = row_of(everyone[0])
    shards = torch.stack([layout.shard(row, 1) for layout in everyone])
    for layout in everyone:
        runs, places = layout.runs(), layout.positions()
        assert [offset for run in runs for offset in range(run.offset, run.offset + run.length)] == list(
            range(layout.local_length)
        )
        assert all(a.position + a.length < b.position for a, b in pairwise(runs)), "runs that touch are one run"
        assert places.tolist() == sorted(places.tolist()), "a rank's chunks are in the row's order"
        if layout.chunk and layout.world_size > 1:
            assert {layout.owners[place // layout.chunk] for place in places.tolist()} == {layout.rank}
        assert torch.equal(shards[layout.rank], row[:, places])
        assert torch.equal(layout.merge(shards), row)
        assert torch.equal(layout.split(row), shards)
        assert layout.split(row).is_contiguous()
    held = torch.cat([layout.positions() for layout in everyone])
    assert held.sort().values.tolist() == list(range(everyone[0].padded))


def test_a_zigzag_may_be_told_as_owners() -> None:
    for rank in range(3):
        told, zigzag = Layout(29, 3, rank, (0, 1, 2, 2, 1, 0)), Layout(29, 3, rank)
        assert told.runs() == zigzag.runs() and told.padded == zigzag.padded
        row = row_of(told)
        assert torch.equal(told.split(row), zigzag.split(row))
        assert torch.equal(told.merge(zigzag.split(row)), row)


@patient
@given(lengths, sizes)
def test_merge_and_split_take_rows_of_any_width_and_dtype(length: int, world_size: int) -> None:
    layout = Layout(length, world_size, 0)
    for row in (row_of(layout, 1)[..., 0], row_of(layout).bfloat16()[:, :, None, :, None]):
        assert torch.equal(layout.merge(layout.split(row)), row)


@patient
@given(lengths, sizes)
def test_padding_goes_to_the_end_and_a_full_row_is_left_alone(length: int, world_size: int) -> None:
    layout = Layout(length, world_size, 0)
    row = torch.arange(2 * length).view(2, length)
    padded = layout.pad(row, 1, -100)
    assert torch.equal(padded[:, :length], row)
    assert padded[:, length:].tolist() == [[-100] * (layout.padded - length)] * 2
    assert layout.pad(padded, 1) is padded
    assert torch.equal(layout.pad(row.T.float(), 0, -100), padded.T.float())


def test_sharding_works_along_any_dim() -> None:
    layout = Layout(16, 2, 1)
    row = torch.arange(3 * 16).view(3, 16)
    assert layout.shard(row, 1).tolist() == row[:, 4:12].tolist()
    assert layout.shard(row, -1).tolist() == row[:, 4:12].tolist()
    assert layout.shard(row.T, 0).tolist() == row[:, 4:12].T.tolist()


@patient
@given(st.integers(1, 12), st.integers(2, 8))
def test_every_rank_sees_the_same_share_of_a_causal_mask(chunk: int, world_size: int) -> None:
    """Pairs of queries and keys: exactly the same on every rank, where nothing is padded."""
    length = 2 * world_size * chunk
    work = {int((layout.positions() + 1).sum()) for layout in layouts(length, world_size)}
    assert work == {length * (length + 1) // 2 // world_size}


@patient
@given(lengths, sizes)
def test_padding_takes_away_no_more_work_than_that_of_its_rows(length: int, world_size: int) -> None:
    work = [int((positions(length, rank=rank, world_size=world_size) + 1).sum()) for rank in range(world_size)]
    padded = Layout(length, world_size, 0).padded
    assert max(work) - min(work) <= (padded - length) * padded


def test_examples_to_read() -> None:
    assert [layout.positions().tolist() for layout in layouts(8, 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [positions(5, rank=rank, world_size=2).tolist() for rank in range(2)] == [[0, 1], [2, 3, 4]]
    assert [positions(3, rank=rank, world_size=4).tolist() for rank in range(4)] == [[0], [1], [2], []]
    assert Layout(5, 1, 0).positions().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("length", "world_size", "rank", "text"),
    [
        (-1, 2, 0, "length=-1 is not possible: it must be a number of tokens, 0 to 2**40."),
        (4, 0, 0, "world_size=0 is not possible: it must be a number of ranks, 1 to 65536."),
        (4, 2, 2, "rank=2 is not possible: it must be from 0 to 1."),
        (4, 2, -1, "rank=-1 is not possible: it must be from 0 to 1."),
    ],
)
def test_a_place_that_does_not_exist_is_refused(length: int, world_size: int, rank: int, text: str) -> None:
    for function in (Layout, lambda n, w, r: positions(n, rank=r, world_size=w)):
        with pytest.raises(BadOption) as error:
            function(length, world_size, rank)
        assert str(error.value) == text


@pytest.mark.parametrize("owners", [(0, 1, 1), (0, 0, 0, 1), (0, 2), (0, 1, 0, 1, 0)])
def test_chunks_dealt_unevenly_are_refused(owners: tuple[int, ...]) -> None:
    with pytest.raises(BadOption) as error:
        Layout(12, 2, 0, owners)
    assert str(error.value) == (
        f"owners={owners} is not possible: it must be the ranks 0 to 1, each as often as every other."
    )
