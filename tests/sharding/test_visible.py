"""Intervals of visible keys against a dense mask, for whole rows and for the ranks of a ring."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Band, Mask, tiles
from hf_ring_attn.sharding.visible import bounds, by_position, visible
from tests.sharding.test_mask import dense, problems


@given(problems(), st.sampled_from([1, 2, 3]))
@settings(max_examples=300, deadline=None)
def test_intervals_show_what_a_mask_shows(
    problem: tuple[Band, Tensor | None, Tensor | None, int, int], world: int
) -> None:
    band, documents, hidden, batch, length = problem
    for rank in range(world):
        layout = Layout(length, world, rank)
        ids = torch.zeros(batch, length, dtype=torch.int64) if documents is None else documents
        whole = layout.pad(ids, 1, -1)
        unseen = None if hidden is None else layout.pad(hidden, 1, False)
        mask = Mask.of(band, batch, layout.padded, whole, unseen)
        table = by_position(tiles(mask, layout.runs(), layout.whole()))
        seen = bounds(table, batch, layout.local_length)
        want = dense(band, whole, unseen, batch, layout.padded)[:, layout.positions()]
        assert torch.equal(visible(seen, layout.padded), want)
        assert torch.equal(visible(seen, length), want[..., :length])


def test_one_interval_is_enough_without_hidden_keys() -> None:
    mask = Mask.of(CAUSAL, 2, 40, torch.tensor([[0] * 13 + [1] * 27, [0] * 40]))
    layout = Layout(40, 2, 1)
    table = by_position(tiles(mask, layout.runs(), layout.whole()))
    assert bounds(table, 2, layout.local_length).shape == (1, 2, 2, 20)


def test_without_visible_keys_none_is_shown() -> None:
    mask = Mask.of(CAUSAL, 1, 4, torch.full((1, 4), -1))
    seen = bounds(tiles(mask, Layout(4, 1, 0).runs(), Layout(4, 1, 0).whole()), 1, 4)
    assert seen.shape == (1, 2, 1, 4) and not visible(seen, 4).any()
