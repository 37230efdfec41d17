"""A rank that is left alone: whatever it is doing, it ends within seconds and says that another rank is the cause."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_ring_attn
from hf_ring_attn.comm.ring import LOCAL, Pending, Ring
from hf_ring_attn.errors import NotSendable, PeerLost, RanksDiffer
from hf_ring_attn.integration.gradients import loss_gradients
from tests.helpers.checks import Ranks
from tests.helpers.live_ranks import RanksFailed
from tests.helpers.models.tiny_models import tiny

CPU = torch.device("cpu")


OPERATIONS: dict[str, Callable[[Ring], object]] = {
    "gathered keys and values": lambda ring: ring.gather(torch.ones(4)).wait(),
    "passed keys and values on": lambda ring: ring.send_on([torch.ones(4)], "passed keys and values on").wait(),
    "passed gradients on": lambda ring: ring.send_on([torch.ones(4)], "passed gradients on").wait(),
    "summed gradients of keys and values": lambda ring: ring.reduce_scatter(torch.ones(ring.size, 4)),
    "averaged over the ring": lambda ring: ring.mean(torch.ones(4)),
    "compared its batch with the other ranks": lambda ring: ring.agree(
        {"rows": 1}, CPU, doing="compared its batch with the other ranks"
    ),
    "compared lengths": lambda ring: ring.numbers(1, CPU, "compared lengths"),
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
            f"hf_ring_attn.errors.PeerLost: rank {rank} of a ring of 3 lost another rank while it {operation}. That "
            "rank failed (its traceback is the cause to look at), or its program ended: it skipped a batch, or left "
            "its loop early. A ring cannot skip a batch on one rank: end the job, or skip it on all ranks."
        ) in failures[rank]


def leaving_early(who: int) -> None:
    """A loop with `shard`, of which one rank has a batch less; its program then ends without an error."""
    ids = torch.zeros(1, 24, dtype=torch.int64)
    for _ in range(2 - (dist.get_rank() == who)):
        hf_ring_attn.shard({"input_ids": ids})
    if dist.get_rank() == who:
        os._exit(0)


def test_a_rank_that_leaves_its_loop_early_is_named_as_such(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as error:
        ranks(3).run(leaving_early, 1)
    for rank in (0, 2):
        last = error.value.failures[rank].strip().splitlines()[-1]
        assert last.startswith(f"hf_ring_attn.errors.PeerLost: rank {rank} of a ring of 3 lost another rank while it")
        assert "compared its batch with the other ranks" in last and "left its loop early" in last


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
        (torch.AcceleratorError("unspecified launch failure", 719), torch.AcceleratorError),
        (NotImplementedError("no sharding strategy"), NotImplementedError),
        (RuntimeError("unhandled cuda error. Last error: Cuda failure 2 'out of memory'"), RuntimeError),
        (ValueError("a mistake of ours"), ValueError),
    ):
        with pytest.raises(raised) as error:
            Pending(ring, "gathered", [], [Broken(given)]).wait()
        assert (error.value if raised is type(given) else error.value.__cause__) is given


def waiting(seconds: float) -> str:
    """The last rank comes late, so that the others' time-out is over."""
    ring = Ring.of(dist.new_group(timeout=timedelta(seconds=seconds)))
    if ring.rank == ring.size - 1:
        time.sleep(3 * seconds)
        return ""
    try:
        ring.mean(torch.ones(4))
    except PeerLost as error:
        return str(error)
    return ""


def test_a_time_out_is_no_failure(ranks: Ranks) -> None:
    text = ranks(2).run(waiting, 1.0)[0]
    assert "rank 0 of a ring of 2 waited 1 s for another rank, until the time-out, while it averaged over the" in text
    assert "That rank is late" in text and "failed" not in text


def sent(dtype: torch.dtype) -> str:
    try:
        Ring.of(None).gather(torch.ones(4).to(dtype), "gathered keys and values").wait()
    except NotSendable as error:
        return str(error)
    return ""


def test_a_dtype_that_the_backend_does_not_know_is_no_failure(ranks: Ranks) -> None:
    for text in ranks(2).run(sent, torch.float8_e4m3fn):
        assert text.startswith("the process group's backend could not send this rank's tensors when it gathered keys")
        assert "scalar type" in text and "gloo sends no float8" in text


def out_of_step() -> str:
    """One rank averages its loss, the other one has the next batch."""
    ring = Ring.of(None)
    try:
        if ring.rank:
            ring.numbers(1, CPU, "averaged its loss")
        else:
            ring.agree({"rows": 1}, CPU, doing="compared its batch with the other ranks")
    except RanksDiffer as error:
        return str(error)
    return ""


def test_ranks_at_different_places_of_the_program_are_named(ranks: Ranks) -> None:
    for text in ranks(2).run(out_of_step):
        assert "rank 0: compared its batch with the other ranks, rank 1: averaged its loss." in text


def without_a_backward(seconds: float) -> tuple[str, list[str]]:
    """The last rank skips the backward of one batch of two, and goes on."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    model: Any = tiny("llama", "ring_fp32")
    try:
        for _ in range(2):
            sharded = hf_ring_attn.shard({"input_ids": torch.ones(1, 8, dtype=torch.int64)}, group)
            with sharded:
                loss = model(**sharded.inputs).logits.sum()
            if dist.get_rank(group) == 0:
                loss.backward()
    except (PeerLost, RanksDiffer) as error:
        time.sleep(2 * seconds)  # the other rank is to wait for its time-out, too
        loss_gradients._waiting.clear()  # a program would end here; this rank has other tests' batches next
        return str(error), getattr(error, "__notes__", [])
    return "", []


def test_a_rank_that_skipped_a_backward_says_so(ranks: Ranks) -> None:
    (waited, no_notes), (went_on, notes) = ranks(2).run(without_a_backward, 1.0)
    assert "while it passed keys and values on" in waited and not no_notes
    assert "rank 0: compared how it made its loss, rank 1: compared its batch with the other ranks" in went_on
    assert len(notes) == 1 and notes[0].startswith("This rank ran no backward since its last forward.")
