"""Tensors in host memory: their values, buffers that are used again, memory that runs out, and the order of copies."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_ring_attn import errors
from hf_ring_attn.layers import host_memory
from hf_ring_attn.layers.host_memory import Buffers, HostMemory, Stored
from tests.helpers.stream_trace import Event, Stream, Trace

CPU = torch.device("cpu")


def test_a_tensor_comes_back_and_its_buffer_is_used_again() -> None:
    memory = HostMemory(CPU)
    given = [torch.randn(3, 4, dtype=dtype).mT for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    copies = [memory.store(x) for x in given]
    assert all(torch.equal(copy.fetch(), x) for copy, x in zip(reversed(copies), reversed(given), strict=True))
    assert (memory.stored, memory.fetched_early) == (3, 2)
    copies.clear()
    assert sorted(map(len, memory.buffers.idle)) == [24, 48, 96]
    small = memory.store(torch.ones(5))
    assert sorted(map(len, memory.buffers.idle)) == [48, 96] and small.buffer.numel() == 24
    large = memory.store(torch.ones(100))
    assert len(memory.buffers.idle) == 1, "an idle one made room for a larger one"
    assert torch.equal(large.fetch(), torch.ones(100)) and torch.equal(small.fetch(), torch.ones(5))


def test_a_tensor_is_freed_once_the_next_one_is_stored() -> None:
    memory = HostMemory(CPU)
    first = memory.store(torch.ones(3))
    assert len(memory.leaving) == 1
    second = memory.store(torch.ones(3))
    assert len(memory.leaving) == 1
    second.fetch()
    assert not memory.leaving and torch.equal(first.fetch(), torch.ones(3))


def test_a_tensor_whose_batch_failed_while_it_left_is_freed() -> None:
    """It stayed on the GPU until the next batch that offloads, which an evaluation is not."""
    memory = HostMemory(CPU)
    x, out = torch.ones(3), torch.ones(3)
    seen = [weakref.ref(each.untyped_storage()) for each in (x, out)]
    copy = memory.store(x)
    beside = copy.store_beside(out)
    del x, out, copy
    assert seen[0]() is None and seen[1]() is not None
    del beside
    assert seen[1]() is None and len(memory.buffers.idle) == 2
    memory.settle()
    assert torch.equal(memory.store(torch.ones(3)).fetch(), torch.ones(3))


def test_a_copy_that_fails_gives_its_buffer_back() -> None:
    memory = HostMemory(CPU)
    with mock.patch.object(Tensor, "copy_", side_effect=torch.OutOfMemoryError), pytest.raises(torch.OutOfMemoryError):
        memory.store(torch.ones(3))
    assert len(memory.buffers.idle) == 1 and not memory.leaving


def test_a_tensor_that_changes_while_it_leaves_is_refused() -> None:
    memory = HostMemory(CPU)
    x = torch.ones(3)
    copy = memory.store(x)
    x += 1
    with pytest.raises(errors.ChangedInPlace, match=r"changed its input \(3,\) in place while offload_above copied it"):
        copy.fetch()


def test_companions_are_fetched_with_their_tensor() -> None:
    memory = HostMemory(CPU)
    inputs, beside = [], []
    for number in range(3):
        inputs.append(memory.store(torch.full((3,), float(number))))
        memory.settle()
        beside.append([inputs[-1].store_beside(torch.full((2,), number + 0.5)) for _ in range(2)])
    assert memory.stored == 9 and len(memory.leaving) == 2
    for number in (2, 1, 0):
        assert torch.equal(inputs[number].fetch(), torch.full((3,), float(number)))
        ahead = [copy.fetched is not None for copy in (*beside[number], *beside[number - 1])]
        assert ahead == [True, True, number > 0, number > 0] or number == 0
        for copy in beside[number]:
            assert torch.equal(copy.fetch(), torch.full((2,), number + 0.5))
    assert memory.fetched_early == 6
    again = [inputs[0].fetch(), *(copy.fetch() for copy in beside[0])]  # a second backward of the same graph
    assert [float(x[0]) for x in again] == [0.0, 0.5, 0.5]


def test_an_output_of_attention_that_changes_while_it_leaves_is_refused() -> None:
    memory = HostMemory(CPU)
    out = torch.ones(3)
    copy = memory.store(torch.ones(3)).store_beside(out)
    out += 1
    with pytest.raises(errors.SavedAttentionChanged, match=r"output \(3,\) of its attention in place"):
        copy.fetch()


def test_buffers_are_made_ahead_once() -> None:
    buffers = Buffers(locked=False)
    for _ in range(2):
        buffers.reserve([10, 30, 20, 20])
        assert sorted(map(len, buffers.idle)) == [10, 20, 20, 30]
    taken = [len(buffers.take(size)) for size in (20, 10, 20, 30)]
    assert taken == [20, 10, 20, 30] and not buffers.idle
    with (
        mock.patch.object(host_memory, "free_bytes", return_value=8 << 30),
        pytest.raises(errors.HostMemoryFull, match=r"needs 6\.0 GiB more"),
    ):
        Buffers(locked=True).reserve([2 << 30] * 3)


def test_memory_that_runs_out_is_refused() -> None:
    locked = Buffers(locked=True)
    text = r"offload_above needs 2\.0 GiB more of page-locked host memory, but 5\.0 GiB are free"
    with (
        mock.patch.object(host_memory, "free_bytes", return_value=5 << 30),
        pytest.raises(errors.HostMemoryFull, match=text),
    ):
        locked.take(2 << 30)


def test_ranks_of_a_machine_that_take_memory_at_once_leave_some(driver: Driver) -> None:
    """Each saw the same bytes free, so together they took more than there were, and the system killed one."""
    text = r"1\.0 GiB more .*, but 11\.0 GiB are free\. 8 ranks ask for as much at once, and 4\.0 GiB stay free\."
    with (
        mock.patch.object(host_memory, "free_bytes", return_value=11 << 30),
        mock.patch.object(host_memory, "pages", return_value=torch.zeros(1, dtype=torch.uint8)),
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "8"}),
    ):
        with pytest.raises(errors.HostMemoryFull, match=text):
            Buffers(locked=True).take(1 << 30)
        os.environ["LOCAL_WORLD_SIZE"] = "7"
        Buffers(locked=True).take(1 << 30)


def test_a_limit_of_the_process_is_named(driver: Driver) -> None:
    """It was an OSError of this rank alone, in the middle of a forward: the others waited for it."""
    with (
        mock.patch.object(host_memory, "free_bytes", return_value=64 << 30),
        mock.patch("mmap.mmap", side_effect=OSError(12, "Cannot allocate memory")),
        pytest.raises(errors.HostMemoryFull, match=r"The system said: \[Errno 12\] Cannot allocate memory\."),
    ):
        Buffers(locked=True).take(10)


def test_memory_is_touched_by_the_threads_that_can_start() -> None:
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        host_memory.touch(torch.ones(4, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("processors", "ranks", "threads"), [(128, 8, 8), (32, 2, 8), (32, 8, 4), (2, 4, 1), (3, 1, 3)]
)
def test_new_memory_is_touched_by_a_ranks_share_of_the_processors(processors: int, ranks: int, threads: int) -> None:
    memory = torch.ones(1000, dtype=torch.uint8)
    with (
        mock.patch("os.sched_getaffinity", return_value=set(range(processors)), create=True),
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(ranks)}),
        mock.patch(f"{host_memory.__name__}.ThreadPoolExecutor", wraps=ThreadPoolExecutor) as pool,
    ):
        host_memory.touch(memory)
    pool.assert_called_once_with(threads)
    assert not memory.any()


class Driver:
    """CUDA's runtime, as far as buffers use it: which pages are locked, and the error that its next launch raises."""

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.refuses, self.error = False, 0
        self.synchronize = mock.Mock()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.error = 712 if address in self.locked else 801 if self.refuses else 0
        if not self.error:
            self.locked.add(address)
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return {712: "already mapped", 801: "operation not supported"}[code]

    def launch(self, *_: Any, **__: Any) -> None:
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(self.cudaGetErrorString(error))


@pytest.fixture
def driver() -> Iterator[Driver]:
    found = Driver()
    with (
        mock.patch.object(torch.cuda, "cudart", return_value=found),
        mock.patch.object(torch.cuda, "synchronize", found.synchronize),
        mock.patch.object(host_memory, "launch_nothing", found.launch),
    ):
        yield found


def test_pages_are_unlocked_before_they_go(driver: Driver) -> None:
    buffers = Buffers(locked=True, device=torch.device("cuda", 1))
    buffers.reserve([10, 20])
    taken = buffers.take(10)
    assert len(driver.locked) == 2
    buffers.give(taken)
    del buffers, taken
    assert not driver.locked
    driver.synchronize.assert_called_once_with(torch.device("cuda", 1))


@pytest.mark.parametrize(("free", "left"), [(20, 2), (8, 0)])
def test_idle_buffers_make_room_where_memory_is_short(driver: Driver, free: int, left: int) -> None:
    memory = HostMemory(torch.device("cpu"))
    memory.buffers = Buffers(locked=True)
    with mock.patch.object(host_memory, "free_bytes", return_value=64 << 30):
        memory.buffers.reserve([10, 20])
    in_use = memory.buffers.take(10)
    memory.buffers.reserve([10, 20])
    with (
        mock.patch.dict(host_memory._MEMORY, {memory.device: memory}, clear=True),
        mock.patch.object(host_memory, "free_bytes", return_value=free << 30),
    ):
        host_memory.make_room(6 << 30)
    assert len(memory.buffers.idle) == left and len(driver.locked) == left + 1
    memory.buffers.give(in_use)


def test_a_buffer_that_is_given_back_while_others_go_stays_and_stays_locked(driver: Driver) -> None:
    """It was dropped with its pages locked: a tensor may go in a garbage collection at any time."""
    buffers = Buffers(locked=True)
    with mock.patch.object(host_memory, "free_bytes", return_value=64 << 30):
        buffers.reserve([10, 20])
    in_use, free = buffers.take(10), buffers.free

    def freeing(gone: list[torch.Tensor]) -> None:
        free(gone)
        buffers.give(in_use)

    with mock.patch.object(buffers, "free", freeing):
        buffers.clear()
    assert buffers.idle == [in_use] and len(driver.locked) == 1


def test_a_driver_that_locks_no_more_is_named_and_its_error_is_taken_from_the_next_launch(driver: Driver) -> None:
    driver.refuses = True
    with (
        mock.patch.object(host_memory, "free_bytes", return_value=64 << 30),
        pytest.raises(errors.HostMemoryFull, match=r"64\.0 GiB are free\. The driver said: operation not supported\."),
    ):
        Buffers(locked=True).take(10)
    driver.launch()


def test_pages_can_be_written_and_outlive_their_maker() -> None:
    made = host_memory.pages(3 * host_memory.GRAIN)
    assert made.data_ptr() % 4096 == 0 and len(made) == 3 * host_memory.GRAIN
    gc.collect()
    made[-1] = 7
    assert int(made[-1]) == 7 and not int(made[0])


# ---- the order of copies ---------------------------------------------------------------------------------------------


class Side(Stream):
    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Within:
    def __init__(self, trace: Trace, stream: Stream) -> None:
        self.on = trace.on(stream)

    def __enter__(self) -> None:
        self.on.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.on.__exit__(*error)


def traced() -> tuple[Trace, HostMemory]:
    trace = Trace()
    trace.current.append(trace.new_stream())
    memory = HostMemory(CPU)
    memory.stream = Side(trace, "the copies' stream")
    memory.module = SimpleNamespace(
        current_stream=lambda _device: trace.current[-1], stream=lambda stream: Within(trace, stream)
    )
    return trace, memory


def races_of(trace: Trace, memory: HostMemory) -> list[str]:
    side: Any = memory.stream
    with trace:
        trace.streams.append(side)
        trace.reuse()
    return trace.races()


def races(layers: int = 4, steps: int = 2) -> list[str]:
    """Of steps whose layers each store their input and what they attended, and fetch them in the opposite order."""
    trace, memory = traced()
    with trace:
        for _ in range(steps):
            x: Tensor = torch.ones(4)
            copies: list[tuple[Stored, Stored]] = []
            for _ in range(layers):
                of_input = memory.store(x)
                attended = x * 3
                memory.settle()
                copies.append((of_input, of_input.store_beside(attended)))
                x = attended + x
                del attended
            x = x * 2
            while copies:
                of_input, of_attention = copies.pop()
                x = of_input.fetch() * x
                x = of_attention.fetch() * x
                del of_input, of_attention
    return races_of(trace, memory)


def races_of_a_failed_step() -> list[str]:
    """Of one that stores two tensors, and starts to fetch one of them; they go while another stream is in use."""
    trace, memory = traced()
    with trace:
        copies = [memory.store(torch.ones(4)), memory.store(torch.ones(4))]
        copies[0].start()
        with trace.on(trace.new_stream()):
            copies.clear()
    return races_of(trace, memory)


def test_copies_are_in_order_with_the_computation() -> None:
    assert not races() and not races_of_a_failed_step()


@pytest.mark.parametrize(("owner", "waits"), [(Stream, "wait_event"), (Side, "wait_stream")])
def test_planted_races_are_seen(owner: type[Stream], waits: str) -> None:
    with mock.patch.object(owner, waits):
        assert races()
        assert races_of_a_failed_step() or waits == "wait_stream"
