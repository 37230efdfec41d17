"""Ranks that failed ask by the group's store whether all did: a message would be taken for one of the others'."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from hf_ring_attn.comm import meeting
from hf_ring_attn.comm.ring import LOCAL, Ring
from tests.helpers.checks import Ranks


def meetings(alone: int | None) -> list[bool]:
    """Two meetings; rank ``alone`` only comes to the second one, in which its patience is short."""
    ring = Ring.of(dist.new_group())
    found = [meeting.meet(ring)]
    with mock.patch.object(meeting, "PATIENCE", timedelta(seconds=0.3)):
        if alone is None or ring.rank == alone:
            found.append(meeting.meet(ring))
    dist.barrier()
    return found


@pytest.mark.parametrize("alone", [0, 1, None])
def test_a_rank_knows_if_it_came_alone(ranks: Ranks, alone: int | None) -> None:
    expected = {rank: [True] if alone is not None else [True, True] for rank in range(3)}
    if alone is not None:
        expected[alone] = [True, False]
    assert ranks(3).run(meetings, alone) == [*expected.values()]


def waited_for(rank: int) -> bool:
    """One rank waits for the others, which go on at once."""
    ring = Ring.of(dist.new_group())
    if ring.rank == rank:
        return meeting.meet(ring)
    return meeting.meet(ring, waits=False)


def test_ranks_that_only_come_need_not_wait(ranks: Ranks) -> None:
    assert ranks(2).run(waited_for, 1) == [True, True]


def test_a_ring_of_one_is_complete() -> None:
    assert meeting.meet(Ring(LOCAL))
