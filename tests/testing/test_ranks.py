"""Live ranks: what comes back, what a failure says, and that the next run is not touched by it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.cases import WORLD_SIZES
from tests.helpers.live_ranks import LiveRanks, RanksFailed
from tests.helpers.patience import patient

Ranks = Callable[[int], LiveRanks]

# ---- the functions that the ranks run ------------------------------------------------------------------------------


def summed(number: int, *, times: int = 1) -> tuple[int, int, int, Tensor]:
    total = torch.tensor([float(number * times * (dist.get_rank() + 1))])
    dist.all_reduce(total)
    return os.getpid(), dist.get_rank(), dist.get_world_size(), total


def environment() -> tuple[int, dict[str, str]]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return torch.get_num_threads(), {name: os.environ[name] for name in names}


def tensors(given: Tensor) -> dict[str, Any]:
    weight = torch.nn.Parameter(given)
    return {"graph": weight * 2, "view": torch.zeros(10**6)[:3], "bf16": [given.bfloat16()], "given": weight}


def drawn() -> float:
    return float(torch.rand(()))


def unpicklable() -> object:
    return lambda: None


def refuse(who: list[int], then: str = "return") -> None:
    """Raises on some ranks; the others do what ``then`` says."""
    if dist.get_rank() in who:
        raise ValueError(f"refused by {dist.get_rank()}")
    if then == "wait":
        dist.barrier()


def leave(who: int) -> None:
    if dist.get_rank() == who:
        os._exit(7)
    dist.barrier()


def hang(who: int) -> None:
    if dist.get_rank() == who:
        time.sleep(600)


def fail_the_test() -> None:
    pytest.fail("said so")


def send_without_a_receiver() -> None:
    """Leaves a message under way and raises: ranks that went on after this would receive it in the next run."""
    peer = 1 - dist.get_rank()
    dist.isend(torch.full((1,), 666.0), peer)
    raise ValueError("after sending")


def exchange() -> float:
    peer, got = 1 - dist.get_rank(), torch.zeros(1)
    work = dist.isend(torch.full((1,), float(dist.get_rank())), peer)
    dist.recv(got, peer)
    if work is not None:
        work.wait()
    return float(got)


# ---- and what comes of it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_answer_in_order_and_stay_alive(world_size: int) -> None:
    with LiveRanks(world_size) as world:  # shared ones are started anew every so many runs
        first, second = (world.run(summed, 3, times=2) for _ in range(2))
    assert [answer[:3] for answer in first] == [answer[:3] for answer in second]
    assert len({pid for pid, *_ in first} | {os.getpid()}) == world_size + 1
    assert [answer[1:3] for answer in first] == [(rank, world_size) for rank in range(world_size)]
    assert all(float(total) == 6 * sum(range(1, world_size + 1)) for *_, total in first)


def test_ranks_have_one_thread_and_the_environment_of_torchrun(ranks: Ranks) -> None:
    for rank, (threads, variables) in enumerate(ranks(2).run(environment)):
        assert threads == 1
        assert variables == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip


def test_tensors_come_back_by_value_without_their_graph(ranks: Ranks) -> None:
    given = torch.arange(4.0)
    (answer,) = ranks(1).run(tensors, given)
    assert torch.equal(answer["graph"], 2 * given)
    assert torch.equal(answer["given"], given)
    assert not any(answer[name].requires_grad for name in ("graph", "given"))
    assert torch.equal(answer["bf16"][0], given.bfloat16())
    assert answer["view"].untyped_storage().nbytes() == 12
    assert not any(x.is_shared() for x in (answer["graph"], answer["view"]))


def test_random_numbers_do_not_depend_on_earlier_tests(ranks: Ranks) -> None:
    assert len({*ranks(2).run(drawn), *ranks(2).run(drawn), *ranks(1).run(drawn)}) == 1


def test_an_exception_on_all_ranks(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)^3 of 3 ranks failed.*rank 2 raised:\n.*in refuse.*by 2") as error:
        ranks(3).run(refuse, [0, 1, 2])
    assert sorted(error.value.failures) == [0, 1, 2]
    assert error.value.silent == {}
    assert all(f"ValueError: refused by {rank}" in text for rank, text in error.value.failures.items())
    assert ranks(3).run(summed, 1)[0][2] == 3


def test_an_exception_on_one_rank_while_the_others_return(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="1 of 2 ranks failed") as error:
        ranks(2).run(refuse, [1])
    assert [*error.value.failures] == [1]
    assert error.value.silent == {}
    assert ranks(2).run(summed, 1)[0][2] == 2


def test_an_exception_on_one_rank_while_the_others_wait_for_it(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.live_ranks.GRACE_SECONDS", 1.0)
    started = time.monotonic()
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 raised.*rank 1 did not answer.*in refuse") as error:
        ranks(2).run(refuse, [0], then="wait")
    assert [*error.value.failures] == [0]
    assert "in refuse" in error.value.silent[1]
    assert time.monotonic() - started < 10
    assert ranks(2).run(summed, 1)[0][2] == 2


def test_a_rank_that_ends(ranks: Ranks) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 ended with exit code 7, without an answer") as error:
        ranks(3).run(leave, 1)
    assert 1 in error.value.failures
    assert time.monotonic() - started < 15
    assert ranks(3).run(summed, 1)[0][2] == 3


def test_a_rank_that_hangs() -> None:
    with LiveRanks(2, timeout_seconds=3) as pair:
        pair.run(summed, 1)
        with pytest.raises(RanksFailed, match=r"(?s)1 of 2 ranks failed.*rank 1 did not answer within 3\.. s") as error:
            pair.run(hang, 1)
        assert error.value.failures == {}
        assert "in hang" in error.value.silent[1]
        assert pair.run(summed, 1)[0][2] == 2


def test_messages_of_a_failed_run_never_reach_the_next(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="after sending"):
        ranks(2).run(send_without_a_receiver)
    assert ranks(2).run(exchange) == [1.0, 0.0]


def test_what_is_no_ordinary_exception_is_reported_too(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="Failed: said so"):
        ranks(1).run(fail_the_test)
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 raised:.*(pickle|local object)"):
        ranks(1).run(unpicklable)
    with pytest.raises(RanksFailed, match="SystemExit: 3"):
        ranks(1).run(sys.exit, 3)


def test_a_function_that_ranks_cannot_import_is_refused_here(ranks: Ranks) -> None:
    with pytest.raises(AttributeError, match="local object"):
        ranks(1).run(lambda: None)
    assert ranks(1).run(summed, 1)[0][1] == 0


def test_ranks_can_be_closed_twice_and_run_again() -> None:
    pair = LiveRanks(2)
    before = {pid for pid, *_ in pair.run(summed, 1)}
    pair.close()
    pair.close()
    assert not any(alive(pid) for pid in before)
    assert before.isdisjoint({pid for pid, *_ in pair.run(summed, 1)})
    pair.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


ORPHANS = """
import os
from tests.testing import test_ranks
from tests.helpers.live_ranks import LiveRanks
pair = LiveRanks(2)
print(*(pid for pid, *_ in pair.run(test_ranks.summed, 1)), flush=True)
pair._world.members[0].wire.send_bytes(__import__("pickle").dumps((test_ranks.hang, (0,), {})))
os._exit(1)
"""


@pytest.mark.slow
@pytest.mark.turns
def test_ranks_end_with_their_process_even_if_it_is_killed_and_they_hang() -> None:
    """The guard of conftest.py ends the run in this way."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", ORPHANS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(60), check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
