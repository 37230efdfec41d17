"""No two accesses to the same bytes without an order: streams, signals and freed memory of pulls, on fakes that note
who waits for whom. tests/gpu has fifty passes on real ones, where the times decide what shows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fake_flash4 import Fake
from hf_ring_attn.backward import gradients
from hf_ring_attn.kernels import Params
from hf_ring_attn.kernels.flash4 import Flash4
from hf_ring_attn.layout import Layout
from hf_ring_attn.mask import CAUSAL, Mask
from hf_ring_attn.ring import forward
from hf_ring_attn.tables import Plan, Tables
from hf_ring_attn.traffic import heads, pulls
from stream_trace import Event, Stream, Trace, rank

HEADS, KV_HEADS, WIDTH = 4, 4, 4


def attend(road: pulls.Pulls, kernel: Flash4, length: int, heads_per_gather: int = 0) -> None:
    """Forward and backward of a row."""
    layout = Layout(length, road.ring.size, road.ring.rank)
    plan = Plan.of(road.ring, layout, Mask.of(CAUSAL, 1, length), sparse_share=0)
    tables = Tables.of(plan.tiles, plan.stops, road.ring.size)
    q, k, v, dout = (torch.zeros(1, layout.local_length, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    out, lse = forward(road, kernel, q, k, v, tables, Params(0.5), heads_per_gather)
    gradients(road, kernel, dout, q, k, v, out, lse, tables, Params(0.5), "ring", 0, {})


def races(
    ranks: int, lengths: tuple[int, ...] = (24, 24, 48), abreast: bool = True, heads_per_gather: int = 0
) -> list[str]:
    """Of a forward and a backward of rows of these lengths, on every rank."""
    trace = Trace()
    for number in range(ranks):
        kernel = Flash4(library=Fake())
        kernel.abreast = abreast
        with rank(trace, number, ranks) as road:
            for length in lengths:
                attend(road, kernel, length, heads_per_gather)
    return trace.races()


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "ROUND", 64)


@pytest.mark.parametrize("abreast", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_two_accesses_are_in_order(ranks: int, abreast: bool) -> None:
    assert not races(ranks, abreast=abreast)


def test_also_where_heads_walk_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SUMS", "QUERIES", "SCORES"):
        monkeypatch.setattr(heads, name, 1)
    assert not races(3, (24, 24))


def test_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one stream has been given to do, the other one's freed memory waits for."""
    backward, calls = Flash4.backward, itertools.count()

    def failing(self: Flash4, *args: Any) -> None:
        if next(calls) == 5:
            raise torch.OutOfMemoryError
        backward(self, *args)

    monkeypatch.setattr(Flash4, "backward", failing)
    trace = Trace()
    with rank(trace, 0, 3) as road:
        with pytest.raises(torch.OutOfMemoryError):
            attend(road, Flash4(library=Fake()), 24)
        torch.zeros(1)  # in memory that was freed, maybe
    assert not trace.races()


MAIN, OTHER, KEYS, SUMS = range(4)
"""Of a rank's streams."""


@pytest.mark.parametrize("stream", [MAIN, OTHER, KEYS])
def test_every_event_is_needed(monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    """Keys and sums that have arrived, by whom they are read; and a room that has been read, by whom it is written."""

    def wait_event(self: Stream, event: Event) -> None:
        if not self.name.startswith(f"stream {stream} "):
            self.queue(event.node)

    monkeypatch.setattr(Stream, "wait_event", wait_event)
    assert races(3, (24, 24), heads_per_gather=1)


@pytest.mark.parametrize("pair", [(OTHER, MAIN), (MAIN, OTHER), (KEYS, MAIN), (SUMS, MAIN), (SUMS, OTHER)])
def test_every_wait_for_a_stream_is_needed(monkeypatch: pytest.MonkeyPatch, pair: tuple[int, int]) -> None:
    def wait_stream(self: Stream, other: Stream) -> None:
        if (int(self.name.split()[1]), int(other.name.split()[1])) != pair:
            self.queue(other.last)

    monkeypatch.setattr(Stream, "wait_stream", wait_stream)
    assert races(3, (24, 24))


@pytest.mark.parametrize("channel", [pulls.BARRIER, pulls.READY, pulls.READY + 1, pulls.TAKEN, pulls.TAKEN + 1])
def test_every_signal_is_needed(monkeypatch: pytest.MonkeyPatch, channel: int) -> None:
    meet = Trace.meet

    def meeting(self: Trace, *name: object, waits: bool) -> None:
        if not (waits and name[-1] == channel):
            meet(self, *name, waits=waits)

    monkeypatch.setattr(Trace, "meet", meeting)
    assert races(3, (24, 24))
