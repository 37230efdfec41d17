"""No two accesses to the same bytes without an order: streams, signals and freed memory of pulls, on fakes that note
who waits for whom. tests/gpu has fifty passes on real ones, where the times decide what shows."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from hf_ring_attn.attention.backward import gradients
from hf_ring_attn.attention.call import Call, Results, RingOptions
from hf_ring_attn.attention.op import forward
from hf_ring_attn.comm.ring import LOCAL, Ring
from hf_ring_attn.kernels import Params
from hf_ring_attn.kernels.flash4 import Flash4
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from hf_ring_attn.sharding.plan import Plan
from hf_ring_attn.traffic import Messages, Traffic, pulls
from hf_ring_attn.traffic import head_groups as of_heads
from tests.helpers.fake_flash4 import Fake
from tests.helpers.stream_trace import Event, Stream, Trace, rank

HEADS, KV_HEADS, WIDTH = 4, 4, 4


@functools.cache
def flash4() -> Flash4:
    """What its library keeps has been made."""
    kernel, alone = Flash4(library=Fake()), Messages(Ring(LOCAL))
    attend(Trace(), alone, kernel, 24)
    return kernel


def attend(
    trace: Trace, transport: Traffic, kernel: Flash4, length: int, heads_per_gather: int = 0, kv_heads: int = KV_HEADS
) -> None:
    """Forward and backward of a row."""
    with trace.unnoted():
        layout = Layout(length, transport.ring.size, transport.ring.rank)
        plan = Plan.of(transport.ring, layout, Mask.of(CAUSAL, 1, length), sparse_share=0)
        assert plan.tables is plan.tables, "parsed here, and noted nowhere"
    shapes = [(1, layout.local_length, heads, WIDTH) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    q, k, v, dout = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    call = Call(q, k, v, plan, Params(0.5), RingOptions("flash4", heads_per_gather=heads_per_gather))
    out, lse = forward(call, transport, kernel)
    gradients(call, Results(out, lse, dout), transport, kernel)


def races(
    ranks: int, lengths: tuple[int, ...] = (24, 24, 48), two_streams: bool = True, heads_per_gather: int = 0,
    kv_heads: int = KV_HEADS, streams: int = 1,
) -> list[str]:  # fmt: skip
    """Of a forward and a backward of rows of these lengths, on every rank; ``streams``: of the program, by turns."""
    trace = Trace()
    for number in range(ranks):
        kernel = copy.copy(flash4())
        kernel.two_streams = two_streams
        with rank(trace, number, ranks) as transport:
            made = [None, *(trace.new_stream() for _ in range(streams - 1))]
            for turn, length in enumerate(lengths):
                with trace.on(made[turn % streams]):
                    attend(trace, transport, kernel, length, heads_per_gather, kv_heads)
                trace.reuse()
    return trace.races()


@pytest.fixture(autouse=True)
def small_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "ROUND", 64)
    monkeypatch.setattr(pulls.Pulls, "whole_below", 0)


@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.turns
def test_every_two_accesses_are_in_order(ranks: int, two_streams: bool) -> None:
    assert not races(ranks, two_streams=two_streams)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_also_where_rooms_are_used_again(kv_heads: int) -> None:
    assert not races(3, (24, 24), heads_per_gather=1, kv_heads=kv_heads)


@pytest.mark.turns
@pytest.mark.parametrize("ranks", [2, 3])
def test_also_where_heads_are_not_split(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row is too short to split its heads, the next one is not: the same buffers serve both."""
    monkeypatch.setattr(pulls.Pulls, "whole_below", HEADS * 40 * 20)
    assert not races(ranks, (24, 24, 96, 24))


def test_heads_that_are_not_split_need_half_of_the_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer, as rank 0 of two queues them: attention kernels; also half of the events, and fewer copies."""
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((Fake, "forward"), (Fake, "backward"), (Event, "record"), (torch.Tensor, "copy_")):
        counted(owner, name)
    found, kernel = [], flash4()
    for below in (0, 2**30):
        counts.clear()
        monkeypatch.setattr(pulls.Pulls, "whole_below", below)
        trace = Trace()
        with rank(trace, 0, 2) as transport:
            attend(trace, transport, kernel, 24)
        found.append(dict(counts))
    split, whole = found
    for name in ("forward", "backward", "record"):
        assert split[name] == 2 * whole[name] > 0, name
    assert split["copy_"] > whole["copy_"]


def test_also_where_a_program_has_two_streams() -> None:
    """One's gradients lay in memory that the next op, on the other one, was given before they had been read."""
    assert not races(2, (24, 24, 24, 24), streams=2)


def test_also_where_heads_have_ring_passes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SUMS", "QUERIES", "SCORES"):
        monkeypatch.setattr(of_heads, name, 1)
    assert not races(3, (24, 24))


def test_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one stream has been given to do, the other one's freed memory waits for."""
    kernel, backward, calls = flash4(), Flash4.backward, itertools.count()

    def failing(self: Flash4, *args: Any) -> None:
        if next(calls) == 5:
            raise torch.OutOfMemoryError
        backward(self, *args)

    monkeypatch.setattr(Flash4, "backward", failing)
    trace = Trace()
    with rank(trace, 0, 3) as transport:
        with pytest.raises(torch.OutOfMemoryError):
            attend(trace, transport, kernel, 24)
        trace.reuse()
    assert not trace.races()


MAIN, OTHER, KEYS, SUMS = range(4)
"""Of a rank's streams."""


@pytest.mark.turns
@pytest.mark.parametrize("stream", [MAIN, OTHER, KEYS])
def test_every_event_is_needed(monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    """Keys and sums that have arrived, by whom they are read; and a room that has been read, by whom it is written."""

    def wait_event(self: Stream, event: Event) -> None:
        if not self.name.startswith(f"stream {stream} "):
            self.queue(event.node)

    monkeypatch.setattr(Stream, "wait_event", wait_event)
    assert races(3, (24, 24), heads_per_gather=1)


@pytest.mark.parametrize("pair", [(OTHER, MAIN), (MAIN, OTHER), (KEYS, MAIN), (SUMS, MAIN), (SUMS, OTHER)])
@pytest.mark.turns
def test_every_wait_for_a_stream_is_needed(monkeypatch: pytest.MonkeyPatch, pair: tuple[int, int]) -> None:
    def wait_stream(self: Stream, other: Stream) -> None:
        if (int(self.name.split()[1]), int(other.name.split()[1])) != pair:
            self.queue(other.last)

    monkeypatch.setattr(Stream, "wait_stream", wait_stream)
    assert races(3, (24, 24))


@pytest.mark.parametrize("channel", [pulls.BARRIER, pulls.READY, pulls.READY + 1, pulls.TAKEN, pulls.TAKEN + 1])
@pytest.mark.turns
def test_every_signal_is_needed(monkeypatch: pytest.MonkeyPatch, channel: int) -> None:
    meet = Trace.meet

    def meeting(self: Trace, *name: object, waits: bool) -> None:
        if not (waits and name[-1] == channel):
            meet(self, *name, waits=waits)

    monkeypatch.setattr(Trace, "meet", meeting)
    assert races(3, (24, 24))
