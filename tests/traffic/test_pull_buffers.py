"""The buffers of pulls: memory for them, and ranks that have none or have made other numbers of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor

from hf_ring_attn import traffic
from hf_ring_attn.comm.ring import LOCAL, Ring
from hf_ring_attn.errors import NoMemoryForBuffers, RefusedElsewhere, UnevenBuffers
from hf_ring_attn.traffic import pulls
from tests.helpers.checks import Ranks
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.patience import patient
from tests.helpers.pulls_on_cpu import CPU, without_a_gpu

OUT = RuntimeError("CUDA driver error: out of memory")


@contextmanager
def allocations(*answers: object) -> Iterator[mock.MagicMock]:
    """Symmetric memory gives ``answers``, by turns. Yields the calls that free what torch caches."""
    calls = mock.MagicMock(**{"mem_get_info.return_value": (2**20, 2**30)})
    names = {name: getattr(calls, name) for name in ("synchronize", "empty_cache", "mem_get_info")}
    empty = mock.patch("torch.distributed._symmetric_memory.empty", side_effect=answers)
    with empty, mock.patch.multiple(torch.cuda, **names):
        yield calls


def test_a_buffer_takes_memory_that_torch_holds_without_using_it() -> None:
    """The driver had no memory left for it, where torch's caching allocator held plenty."""
    with allocations(OUT, torch.zeros(4)) as calls:
        assert pulls._allocated(4, CPU).shape == (4,)
    calls.empty_cache.assert_called_once_with()
    with allocations(torch.zeros(4)) as calls:
        pulls._allocated(4, CPU)
    calls.empty_cache.assert_not_called()


def test_a_buffer_without_memory_says_what_it_needs() -> None:
    with allocations(OUT, OUT), pytest.raises(NoMemoryForBuffers) as raised:
        pulls._allocated(2**26, CPU)
    assert "CUDA out of memory. The ring's buffer for P2P copies needs 64 MiB, but 1 of 1024 MiB" in str(raised.value)
    assert should_reduce_batch_size(raised.value)
    for answers in ([RuntimeError("another")], [OUT, RuntimeError("another")]):
        with allocations(*answers), pytest.raises(RuntimeError, match="another"):
            pulls._allocated(4, CPU)


def no_memory_on_rank_1(words: str = "") -> list[str]:
    """The errors of a first buffer, of one that grows, and what the set-up says. ``words``: of an error of torch's."""
    ring = Ring.of(None)
    k = torch.randn(1, 4, 1, 2)

    def allocated(size: int, _device: torch.device) -> Tensor:
        if ring.rank == 1:
            raise RuntimeError(words) if words else NoMemoryForBuffers(size, 0, 2**30)
        return torch.zeros(size, dtype=torch.uint8)

    never = AssertionError("torch would wait for the other rank")
    errors = []
    with mock.patch.multiple("torch.distributed._symmetric_memory", rendezvous=mock.MagicMock(side_effect=never)):
        shared = pulls.Shared
        with mock.patch.object(pulls, "_allocated", allocated), without_a_gpu(ranks=2) as transport:
            transport.ring = ring
            with mock.patch.object(pulls, "Shared", shared):
                for begin in (lambda: transport.ring_pass(k, k, [slice(0, 1)], mock.MagicMock()), transport.try_out):
                    try:
                        begin()
                    except (RuntimeError, RefusedElsewhere) as raised:
                        errors.append(f"{type(raised).__name__}: {raised}")
                assert not transport.guard.inside, "a shorter row would be refused"
                with mock.patch.object(pulls, "Pulls", return_value=transport):
                    errors.append(str(traffic._pulls(ring, torch.device("cuda"))))
    return errors


def test_a_rank_without_memory_for_buffers_ends_the_others_with_its_words(ranks: Ranks) -> None:
    other, mine = ranks(2).run(no_memory_on_rank_1)
    for text in mine[:2]:
        assert text.startswith("NoMemoryForBuffers: CUDA out of memory. The ring's buffer for P2P copies needs 2 MiB")
    for text in other[:2]:
        assert text.startswith("RefusedElsewhere: ") and "rank 1: NoMemoryForBuffers: CUDA out of memory." in text
    assert ["cannot be read by the others" in text for text in (mine[2], other[2])] == [True, True]


def test_any_error_of_an_allocation_ends_the_others(ranks: Ranks) -> None:
    """Only NoMemoryForBuffers reached the other ranks; for another error of the driver they waited."""
    other, mine = ranks(2).run(no_memory_on_rank_1, "CUDA driver error: by hand")
    assert mine[:2] == ["RuntimeError: CUDA driver error: by hand"] * 2
    for text in other[:2]:
        assert text.startswith("RefusedElsewhere: ") and "rank 1: RuntimeError: CUDA driver error: by hand" in text


def test_ranks_that_made_different_numbers_of_buffers_do_not_wait_for_each_other() -> None:
    """A ring of two grew before the ring of four did: torch would wait until the time-out."""
    k = torch.randn(1, 4, 1, 2)
    with without_a_gpu(ranks=4) as transport:
        transport.ring.numbers.return_value = [5, 5, 1, 1]  # type: ignore[attr-defined]
        with pytest.raises(UnevenBuffers, match=r"\[5, 5, 1, 1\] buffers .*traffic='messages'"):
            list(transport.ring_pass(k, k, [slice(0, 1)], lambda _source, _lane: (k.clone(), k.clone())))


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ([[7, 1, 3, 0], [7, 1, 1, 0]], "made [3, 1] buffers"),
        ([[7, 1, 3, 0], [7, 1, 3, 1]], "the name of a destroyed one"),
    ],
)
def test_a_ring_that_torch_takes_for_another_takes_messages(told: list[list[int]], why: str) -> None:
    """By the number of their buffers, or by the group's name, which one rank has seen before."""
    sent = mock.MagicMock(**{"wait.return_value": [torch.tensor(told)]})
    with mock.patch.object(Ring, "gather", return_value=sent), mock.patch.object(Ring, "group"):
        assert why in str(traffic._pulls(Ring(LOCAL), CPU))


def told_of_the_name(folder: str) -> list[list[int]]:
    """What this rank tells of its name in a first world and in a second one."""
    told: list[list[int]] = []
    for number in range(2):
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{number}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        with mock.patch.object(Ring, "gather", side_effect=Ring.of(None).gather) as gather:
            assert traffic._pulls(Ring.of(None), CPU) == "every rank needs an NVIDIA GPU"
        told.append(gather.call_args_list[0].args[0].tolist())
    return told


def test_a_rank_tells_that_it_has_seen_the_name(tmp_path: Path) -> None:
    with LiveRanks(2, timeout_seconds=patient(60)) as world:  # it leaves its world
        for first, second in world.run(told_of_the_name, str(tmp_path)):
            assert (first[3], second[3]) == (0, 1)
