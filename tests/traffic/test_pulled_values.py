"""The numbers of a ring by pulls without a GPU: ranks are threads that read one another's memory, and wait."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_ring_attn.attention.backward import gradients
from hf_ring_attn.attention.call import Call, Results, RingOptions
from hf_ring_attn.attention.op import forward
from hf_ring_attn.kernels import KERNELS, Params
from hf_ring_attn.kernels.reference import whole
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask, tiles
from hf_ring_attn.sharding.plan import Plan
from hf_ring_attn.testing import relative_error
from hf_ring_attn.traffic import head_groups as of_heads
from hf_ring_attn.traffic import pulls
from hf_ring_attn.traffic.base import WHOLE
from tests.helpers.checks import EXACT

SECONDS = 60
NAMES = ("out", "dq", "dk", "dv")


@contextmanager
def threads(ranks: int) -> Iterator[list[pulls.Pulls]]:
    """Pulls of every rank, each to be used by a thread of its own. All that is queued runs at once."""
    lock = threading.Lock()
    memory: dict[tuple[int, int], Tensor] = {}
    barriers: dict[object, threading.Barrier] = defaultdict(lambda: threading.Barrier(ranks, timeout=SECONDS))
    signals: dict[object, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(0))
    made: dict[int, int] = defaultdict(int)

    def meet(name: object) -> mock.MagicMock:
        with lock:
            barrier = barriers[name]
        barrier.wait()
        return mock.MagicMock()

    def signal(*name: object) -> threading.Semaphore:
        with lock:
            return signals[name]

    class Memory:
        made = 0

        def __init__(self, ring: Any, size: int, _device: object) -> None:
            self.size, self.views, self.handle = size, dict[object, object](), mock.MagicMock()
            here = ring.rank
            with lock:
                mine = made[here] = made[here] + 1
                for rank in range(ranks):
                    memory.setdefault((mine, rank), torch.full((size,), 255, dtype=torch.uint8))  # nan
                self.of = [memory[mine, rank] for rank in range(ranks)]
            self.mine = self.of[here]
            self.handle.barrier = lambda channel, _: meet((mine, channel))
            self.handle.put_signal = lambda to, channel, _: signal(mine, here, to, channel).release()

            def wait(of: int, channel: int, _: int) -> None:
                assert signal(mine, of, here, channel).acquire(timeout=SECONDS), "a signal that never came"

            self.handle.wait_signal = wait

    def ring(rank: int) -> Any:
        return SimpleNamespace(
            rank=rank, size=ranks, name="threads", group=mock.Mock(spec=[]), small_device=lambda device: device,
            numbers=lambda number, *_: (meet("numbers"), [number])[1], state=cache(lambda kind: kind()),
        )  # fmt: skip

    fakes: dict[str, Any] = {name: mock.MagicMock() for name in ("Stream", "current_stream", "Event", "synchronize")}
    with (
        mock.patch.multiple(torch.cuda, stream=lambda _: nullcontext(), **fakes),
        mock.patch.multiple(pulls, Shared=Memory, ROUND=64),
    ):
        yield [pulls.Pulls(ring(rank), torch.device("cpu")) for rank in range(ranks)]


def row(length: int, heads: int, kv_heads: int) -> list[Tensor]:
    """q, k, v and dout of a whole row, float64."""
    shapes = ((heads, 8), (kv_heads, 8), (kv_heads, 6), (heads, 6))
    return [torch.randn(2, length, *shape, dtype=torch.float64) for shape in shapes]


def share(transport: pulls.Pulls, given: list[Tensor], heads_per_gather: int) -> list[Tensor]:
    """One rank's answer."""
    kernel = copy.copy(KERNELS["reference"])
    kernel.two_streams = True
    layout = Layout(given[0].shape[1], transport.ring.size, transport.ring.rank)
    plan = Plan.of(transport.ring, layout, Mask.of(CAUSAL, 2, layout.padded), sparse_share=0)
    q, k, v, dout = (layout.shard(x, 1) for x in given)
    call = Call(q, k, v, plan, Params(0.3), RingOptions("reference", heads_per_gather=heads_per_gather))
    out, lse = forward(call, transport, kernel)
    return [out, *gradients(call, Results(out, lse, dout), transport, kernel)[:3]]


@pytest.mark.parametrize("passes", ["whole", "halves", "apart"])
@pytest.mark.parametrize(("ranks", "kv_heads", "heads_per_gather"), [(2, 3, 0), (3, 2, 1), (4, 3, 1), (5, 1, 0)])
def test_the_answer_is_that_of_the_whole_row(
    ranks: int, kv_heads: int, heads_per_gather: int, passes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows one after the other, so that buffers and signals are used again, the second one in larger buffers.

    By one pass of all heads, as of short rows, by two halves, or by a pass for each group of heads."""
    torch.manual_seed(ranks)
    monkeypatch.setattr(pulls.Pulls, "whole_below", WHOLE if passes == "whole" else 0)
    for name in ("SUMS", "QUERIES", "SCORES") if passes == "apart" else ():
        monkeypatch.setattr(of_heads, name, 1)
    with threads(ranks) as transports, ThreadPoolExecutor(ranks) as pool:
        for length in (4 * ranks, 8 * ranks, 8 * ranks, 4 * ranks):
            given = q, k, v, dout = row(length, 2 * kv_heads, kv_heads)
            alone = Layout(length, 1, 0).whole()
            table = tiles(Mask.of(CAUSAL, 2, length), alone, alone)
            want = whole(KERNELS["reference"], q, k, v, dout, table, Params(0.3))
            shares = list(
                pool.map(lambda transport, given=given: share(transport, given, heads_per_gather), transports)
            )
            for name, parts in zip(NAMES, zip(*shares, strict=True), strict=True):
                got = Layout(length, ranks, 0).merge(torch.stack(parts))
                assert relative_error(got, want[name]) < EXACT, (length, name)
