"""Losses of whole rows in a loop of one's own, by the methods of a sharded batch."""

from __future__ import annotations

import pytest

from tests.helpers.checks import EXACT, Ranks, distance, worst
from tests.helpers.row_ranks import preference_alone, preference_in_a_ring


@pytest.mark.parametrize(("length", "chunks"), [(29, 0), (32, 0), (97, 4)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_loss_of_pairs_is_that_of_whole_rows(ranks: Ranks, world_size: int, length: int, chunks: int) -> None:
    for share in ranks(world_size).run(preference_in_a_ring, length, chunks):
        errors = distance(share, preference_alone(length))
        assert worst(errors) < EXACT, errors
