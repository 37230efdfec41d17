"""Convolutions and recurrences of a ring's rows against the same on one device, in float64, with gradients."""

from __future__ import annotations

import pytest

from tests.helpers.checks import EXACT, Ranks, distance, worst
from tests.helpers.layer_ranks import ROWS, alone, in_a_ring, joined


@pytest.mark.turns
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_ring_gives_what_one_device_gives(ranks: Ranks, world_size: int) -> None:
    shares = ranks(world_size).run(in_a_ring, ROWS)
    for row, *parts in zip(ROWS, *shares, strict=True):
        errors = distance(joined(parts, row), alone(row))
        assert worst(errors) < EXACT, (row.why, errors)
