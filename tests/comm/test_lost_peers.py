"""A rank that is left alone: whatever it is doing, it ends within seconds and says that another rank is the cause."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hf_ring_attn.comm.ring import LOCAL, Pending, Ring
from hf_ring_attn.errors import PeerLost, RanksFailed
from tests.helpers.checks import Ranks

CPU = torch.device("cpu")


OPERATIONS: dict[str, Callable[[Ring], object]] = {
    "gathered keys and values": lambda ring: ring.gather(torch.ones(4)).wait(),
    "passed keys and values on": lambda ring: ring.send_on([torch.ones(4)], "passed keys and values on").wait(),
    "passed gradients on": lambda ring: ring.send_on([torch.ones(4)], "passed gradients on").wait(),
    "summed gradients of keys and values": lambda ring: ring.reduce_scatter(torch.ones(ring.size, 4)),
    "averaged over the ring": lambda ring: ring.mean(torch.ones(4)),
    "compared its batch with the other ranks": lambda ring: ring.agree({"rows": 1}, CPU, ""),
    "told its length": lambda ring: ring.numbers(1, CPU, "told its length"),
}


def left_alone(operation: str, who: int) -> None:
    ring = Ring.of(None)
    dist.barrier()
    if ring.rank == who:
        os._exit(7)
    OPERATIONS[operation](ring)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_that_dies_is_named_as_the_cause(ranks: Ranks, operation: str) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as error:
        ranks(3).run(left_alone, operation, 1)
    assert time.monotonic() - started < 10
    failures = error.value.failures
    assert "ended with exit code 7" in failures[1]
    for rank in (0, 2):
        assert (
            f"hf_ring_attn.errors.PeerLost: rank {rank} of a ring of 3 lost another rank while it {operation}. Look "
            "for that rank's own traceback, above or below: it is the cause. If there is none, that rank caught its "
            "error and went on. Let such an error end the job, or skip the batch on all ranks."
        ) in failures[rank]


def test_only_what_the_backend_says_is_called_a_lost_peer() -> None:
    ring = Ring(LOCAL)

    class Broken:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def wait(self) -> None:
            raise self.error

    for given, raised in (
        (RuntimeError("Connection closed by peer"), PeerLost),
        (torch.OutOfMemoryError("2 GiB"), torch.OutOfMemoryError),
        (ValueError("a mistake of ours"), ValueError),
    ):
        with pytest.raises(raised) as error:
            Pending(ring, "gathered", [], [Broken(given)]).wait()
        assert error.value is given or error.value.__cause__ is given
