"""Pulls without a GPU: memory on the CPU, and neither streams nor signals. tests/gpu has them on real ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_ring_attn.attention.backward import gradients
from hf_ring_attn.attention.call import Call, Results, RingOptions
from hf_ring_attn.comm.ring import LOCAL, Ring
from hf_ring_attn.errors import LeftHalfway
from hf_ring_attn.kernels import Params
from hf_ring_attn.kernels.base import InOrder, row_products
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from hf_ring_attn.sharding.plan import Plan
from hf_ring_attn.traffic import Gather, GatheredKV, Sums, gathered_kv_for, pulls, seen_by_heads
from hf_ring_attn.traffic import head_groups as traffic_heads
from hf_ring_attn.traffic.packing import Packing
from hf_ring_attn.traffic.pulls import LOST_AFTER_MS, Pulls
from tests.helpers.checks import Ranks
from tests.helpers.live_bytes import peak_bytes
from tests.helpers.pulls_on_cpu import CPU, without_a_gpu

EVERYTHING = Plan.of(Ring(LOCAL), Layout(4, 1, 0), Mask.of(CAUSAL, 1, 4)).tables


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_to_be_kept_is_not_written_over(keep: bool) -> None:
    """A gather pulls into two rooms by turns, unless all that it brings is to stay."""
    k = torch.arange(24.0).view(1, 4, 3, 2)
    with without_a_gpu() as transport:
        parts = list(transport.gathered(Gather(k, -k, [slice(head, head + 1) for head in range(3)], keep=keep)))
    same = [torch.equal(part.k, k[:, :, part.heads]) and torch.equal(part.v, -k[:, :, part.heads]) for part in parts]
    assert same == [keep, True, True]


def test_training_writes_where_an_evaluation_in_inference_mode_did() -> None:
    """Its views of the buffer were kept, as tensors of inference mode, which nothing else may write to."""
    k = torch.arange(24.0).view(1, 4, 3, 2)
    with without_a_gpu() as transport:
        list(transport.gathered(Gather(k, -k, [slice(0, 3)])))  # makes the buffers
        short = k[:, :2]
        with torch.inference_mode():
            for _ in range(2):  # of two buffers
                list(transport.gathered(Gather(short, -short, [slice(0, 3)])))
        (part,) = transport.gathered(Gather(short, -short, [slice(0, 3)]))
    assert torch.equal(part.k, short) and torch.equal(part.v, -short)


def test_a_gather_is_kept_once_all_of_it_has_come() -> None:
    k = torch.arange(24.0).view(1, 4, 3, 2)
    with without_a_gpu() as transport:
        kept = GatheredKV()
        half = seen_by_heads(transport, EVERYTHING, k, k, -k, 1, kept)
        next(half)
        assert kept.parts is None
        first = [next(half), *half]
        assert kept.parts is not None and kept.parts[1:] == first
        transport.gathered = mock.MagicMock(side_effect=AssertionError)
        assert list(seen_by_heads(transport, EVERYTHING, k, k, -k, 1, kept)) == kept.parts
        assert gathered_kv_for(kept.number, kept.role, transport.ring, None, k, -k) is kept
        assert gathered_kv_for(None, None, transport.ring, None, k, -k) is None


def test_lanes_of_unequal_heads_have_room_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three heads the second lane, of one, wrote over the values' sums of the first while others still read them."""
    monkeypatch.setattr(pulls, "ROUND", 64)
    k, lanes = torch.randn(1, 40, 3, 2), [slice(0, 2), slice(2, 3)]
    left = []
    with without_a_gpu(ranks=2) as transport:
        for hop in transport.ring_pass(k, k, lanes, lambda _source, lane: (torch.randn_like(k[:, :, lane]),) * 2):
            left += [hop.sums] if hop.source == 1 else []
        assert transport.outboxes is not None
        memory = transport.outboxes.mine
    assert len(left) == 2
    begin = 0
    for dk, dv in left:
        for x in (dk, dv):
            assert torch.equal(memory[begin : begin + x.nbytes].view(x.dtype).view(x.shape), x)
            begin += x.nbytes
        begin = len(memory) // 2


@pytest.mark.parametrize("way", ["a gather", "a ring pass"])
def test_after_a_pull_that_ended_halfway_the_next_is_refused(way: str) -> None:
    """Signals of the one would be taken for those of the other, and memory be read too early."""
    k = torch.arange(24.0).view(1, 4, 3, 2)
    halves = [slice(0, 2), slice(2, 3)]

    def new(source: int, lane: slice) -> Sums:
        return torch.zeros(1), torch.zeros(1)

    def start(transport: Pulls) -> Iterator[tuple[Tensor, Tensor]]:
        if way == "a gather":
            return ((part.k, part.v) for part in transport.gathered(Gather(k, -k, halves)))
        return ((hop.k, hop.v) for hop in transport.ring_pass(k, -k, halves, new))

    with without_a_gpu() as transport:
        for _ in range(3):
            pairs = list(start(transport))
            assert torch.equal(torch.cat([keys for keys, _ in pairs], 2), k)
            assert torch.equal(torch.cat([values for _, values in pairs], 2), -k)
        next(start(transport))
        with pytest.raises(LeftHalfway, match=r"exception that was caught .* interrupted an earlier attention"):
            start(transport)
    with without_a_gpu() as transport:
        start(transport)  # as if the first allocation after it failed
        with pytest.raises(LeftHalfway):
            start(transport)


# ---- memory of an op that ended half-way -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["a gather", "a ring pass"])
def test_memory_of_queued_copies_stays_after_an_error_and_goes_at_the_end(way: str) -> None:
    """It went back to the allocator with copies into it still queued: they would write over whoever got it next."""
    k, halves = torch.randn(1, 40, 3, 2), [slice(0, 2), slice(2, 3)]
    rooms: list[weakref.ref[Tensor]] = []
    empty = Packing.empty

    def noted(self: Packing, like: Tensor, number: int, ranks: int) -> Tensor:
        room = empty(self, like, number, ranks)
        rooms.append(weakref.ref(room))
        return room

    def attend(transport: Pulls, failing: bool) -> None:
        if way == "a gather":
            for _ in transport.gathered(Gather(k, k, halves)):
                if failing:
                    raise torch.OutOfMemoryError
            return
        for hop in transport.ring_pass(
            k, k, halves, lambda _source, lane: (k[:, :, lane].clone(), k[:, :, lane].clone())
        ):
            rooms.extend(weakref.ref(x) for x in hop.sums)  # at the last hop those that left and those that came
            if failing and hop.source == 0:
                raise torch.OutOfMemoryError

    with without_a_gpu(ranks=1 if way == "a gather" else 2) as transport, mock.patch.object(Packing, "empty", noted):
        attend(transport, failing=False)
        assert rooms and not any(room() is not None for room in rooms)
        rooms.clear()
        with pytest.raises(torch.OutOfMemoryError):
            attend(transport, failing=True)
        held = list(rooms)
        with pytest.raises(LeftHalfway):
            attend(transport, failing=False)
        gc.collect()
        # Two groups' or lanes' keys; and of a ring pass the sums of two lanes that left, and those of one that came.
        assert len(held) == (2 if way == "a gather" else 2 + 4 + 2)
        assert all(room() is not None for room in held)


class Nothing(InOrder):
    """A kernel that adds nothing: its accumulators alone take memory."""

    name = "nothing"

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        return row_products(dout, out)

    def backward(self, *_: object) -> None:
        pass


def peak_of_a_backward(groups: int) -> int:
    """Bytes, buffers too, with 32 heads on one rank of four that pass around the ring in so many groups."""
    tokens, heads, width = 64, 32, 128
    sums = tokens * heads * 2 * width * 4 // groups
    q, k, v, out, dout = (torch.zeros(1, tokens, heads, width, dtype=torch.bfloat16) for _ in range(5))
    with without_a_gpu(ranks=4) as transport, mock.patch.multiple(traffic_heads, SUMS=sums, QUERIES=1, SCORES=1):
        layout = Layout(4 * tokens, 4, 0)
        plan = Plan.of(transport.ring, layout, Mask.of(CAUSAL, 1, 4 * tokens), sparse_share=0)
        lse = torch.zeros(1, heads, tokens)
        call = Call(q, k, v, plan, Params(1.0), RingOptions("nothing"))
        kernel: Any = Nothing()
        found: list[object] = []
        return peak_bytes(lambda: found.append(gradients(call, Results(out, lse, dout), transport, kernel)))


def test_heads_in_several_ring_passes_take_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each query head has keys of its own, float32 sums are most of what a backward holds."""
    monkeypatch.setattr(pulls, "ROUND", 64)
    together = peak_of_a_backward(1)
    assert peak_of_a_backward(2) < 0.6 * together
    assert peak_of_a_backward(4) < 0.4 * together


# ---- the order of what is queued -------------------------------------------------------------------------------------


@contextmanager
def queueing(transport: Pulls) -> Iterator[list[str]]:
    """Notes what the compute stream waits for and writes."""
    log: list[str] = []
    compute: Any = torch.cuda.current_stream()
    write = Packing.write

    def written(places: list[tuple[slice, Tensor, Tensor]], k: Tensor, v: Tensor) -> None:
        log.append("wrote")
        write(places, k, v)

    def followed(stream: object) -> None:
        log.append("waited for pulls" if stream is transport.keys_stream else "waited")

    with (
        mock.patch.object(compute, "wait_stream", followed),
        mock.patch.object(compute, "wait_event", side_effect=lambda _event: log.append("waited for an event")),
        mock.patch.object(Packing, "write", staticmethod(written)),
    ):
        yield log


def test_a_buffer_is_written_after_the_pulls_of_an_attention_on_another_stream() -> None:
    """A teacher's, say: the barrier that says that all have read this buffer was waited for by its stream alone."""
    k = torch.randn(1, 4, 3, 2)
    with without_a_gpu() as transport:
        transport.keys_stream = mock.MagicMock()  # one of its own: all others are one mock
        with queueing(transport) as log:
            list(transport.gathered(Gather(k, k, [slice(0, 3)])))
    assert log == ["waited for pulls", "wrote", "waited for an event"]


def test_new_sums_are_cleared_while_the_first_keys_are_on_their_way() -> None:
    k = torch.randn(1, 4, 1, 2)
    with without_a_gpu(ranks=2) as transport, queueing(transport) as log:

        def new(source: int, lane: slice) -> Sums:
            log.append("new sums")
            return k.clone(), k.clone()

        list(transport.ring_pass(k, k, [slice(0, 1)], new))
    assert log[log.index("wrote") + 1 :] == ["new sums", "waited for an event", "waited for an event"]


# ---- how long a rank waits -------------------------------------------------------------------------------------------


def patience() -> tuple[int, list[int]]:
    """Of a ring with two hours; and what its barriers and signals are told."""
    ring = Ring.of(dist.new_group(timeout=timedelta(hours=2)))
    k = torch.randn(1, 4, 1, 2)
    with without_a_gpu(ranks=2) as transport:
        transport.lost_after_ms = Pulls(ring, CPU).lost_after_ms
        list(transport.ring_pass(k, k, [slice(0, 1)], lambda _source, _lane: (k.clone(), k.clone())))
        handles: list[Any] = [shared.handle for shared in (*transport.keys, transport.outboxes) if shared is not None]
    told = [call.args[-1] for handle in handles for call in handle.method_calls]
    dist.barrier(ring.group)  # nothing was sent, and the other rank may still be connecting
    dist.destroy_process_group(ring.group)
    return transport.lost_after_ms, told


def test_pulls_wait_as_long_as_the_process_group_does(ranks: Ranks) -> None:
    for found, told in ranks(2).run(patience):
        assert found == 2 * 3600 * 1000
        assert set(told) == {found} and len(told) == 5  # a barrier, two signals and the waits for them


def test_where_torch_does_not_tell_a_timeout_it_is_ten_minutes() -> None:
    class Group:
        def _get_backend(self, device: torch.device) -> object:
            raise RuntimeError(f"no backend for {device}")

    for group in (Group(), object(), mock.MagicMock(spec=["_get_backend"], **{"_get_backend.return_value": object()})):
        ring = mock.MagicMock(group=group)
        assert pulls._lost_after_ms(ring, CPU) == LOST_AFTER_MS == 600_000
    ring = mock.MagicMock()
    ring.group._get_backend.return_value.options._timeout = timedelta(0)
    assert pulls._lost_after_ms(ring, CPU) == 1, "0 would be for ever"
