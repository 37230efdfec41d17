"""Messages of a ring: who meets whose keys, and sums that come home complete. test_pulls.py has pulls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_ring_attn.comm.ring import LOCAL, Pending, Ring
from hf_ring_attn.errors import NoPulls
from hf_ring_attn.sharding.layout import Layout, Owners, chunks_of
from hf_ring_attn.traffic import (
    Gather,
    Messages,
    Sums,
    head_halves,
    ring_pass_groups,
    ring_pass_halves,
    traffic_of,
    visiting_order,
)
from hf_ring_attn.traffic.base import PULLED, WHOLE
from hf_ring_attn.traffic.head_groups import LARGEST, QUERIES, SCORES, SUMS, head_groups
from hf_ring_attn.traffic.packing import Packing
from tests.helpers.checks import Ranks

CPU = torch.device("cpu")


@contextmanager
def sending(log: list[str]) -> Iterator[None]:
    """Notes what is sent on, and when."""
    send_on = Ring.send_on

    def noted(self: Ring, tensors: Sums, doing: str) -> Pending:
        log.append(doing)
        return send_on(self, tensors, doing)

    with mock.patch.object(Ring, "send_on", noted):
        yield


Steps = list[tuple[int, int, Tensor, Tensor, Tensor, Tensor]]


def ring_steps(heads: int, dtype: torch.dtype, members: list[int] | None = None) -> tuple[list[str], Steps]:
    """Every hop of a pass around the ring of these ranks: rank r adds 2**12 r + source + 1/16 to the sums of each
    source, which bfloat16 could not hold. Nothing on the other ranks."""
    group = None if members is None else dist.new_group(members)
    if members is not None and dist.get_rank() not in members:
        return [], []
    ring, log, seen = Ring.of(group), list[str](), []
    k = torch.arange(heads).expand(1, 4, heads)[..., None] + 100.0 * ring.rank
    lanes = head_halves(heads, ring.size)

    def new(source: int, lane: slice) -> Sums:
        return torch.zeros(5, dtype=dtype), torch.zeros(2, 3, dtype=dtype)

    with sending(log):
        for hop in Messages(ring).ring_pass(k, -k, lanes, new):
            for x in hop.sums:
                x += 2.0**12 * ring.rank + hop.source + 1 / 16
            log.append(f"computed {hop.source}")
            seen.append((hop.source, hop.heads.start, hop.k.clone(), hop.v.clone(), *(x.clone() for x in hop.sums)))
    return log, seen


@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_ring_pass_meets_every_ranks_keys_once_its_own_last(ranks: Ranks, size: int, heads: int) -> None:
    starts = [lane.start for lane in head_halves(heads, size)]
    for rank, (_, seen) in enumerate(ranks(size).run(ring_steps, heads, torch.float32)):
        order = [(rank - 1 - step) % size for step in range(size)]
        assert order[-1] == rank
        assert [(source, start) for source, start, *_ in seen] == [(s, start) for s in order for start in starts]
        for source, start, k, v, *_ in seen:
            want = 100.0 * source + torch.arange(start, start + k.shape[2])
            assert (k == want[:, None]).all() and (v == -want[:, None]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_sums_are_complete_when_their_owner_has_added_its_share(ranks: Ranks, size: int, dtype: torch.dtype) -> None:
    for rank, (_, seen) in enumerate(ranks(size).run(ring_steps, 2, dtype)):
        home = [sums for source, _, _, _, *sums in seen if source == rank]
        assert len(home) == len(head_halves(2, size))
        for sums in home:
            assert [x.shape for x in sums] == [(5,), (2, 3)]
            assert all((x == sum(2.0**12 * r + rank + 1 / 16 for r in range(size))).all() for x in sums)
            assert all(x.dtype == dtype for x in sums)


def test_keys_and_sums_travel_while_others_are_computed(ranks: Ranks) -> None:
    keys, sums = "passed keys and values on", "passed gradients on"
    for rank, (log, _) in enumerate(ranks(3).run(ring_steps, 2, torch.float32)):
        first, second = (f"computed {(rank - 1 - step) % 3}" for step in range(2))
        own = f"computed {rank}"
        # the next keys leave before these are computed, and the sums of one lane before the other lane is
        assert log == [keys, keys, first, sums, first, sums, second, sums, second, sums, own, own]


def test_a_ring_can_be_a_part_of_the_world(ranks: Ranks) -> None:
    passes = ranks(4).run(ring_steps, 1, torch.float32, [1, 3])
    assert [[source for source, *_ in seen] for _, seen in passes] == [[], [1, 0], [], [0, 1]]


def gathered(heads: int, groups: list[slice], more: bool) -> list[tuple[slice, Tensor, Tensor]]:
    ring = Ring.of(None)
    owners = (*range(ring.size), *range(ring.size), *reversed(range(ring.size)), *range(ring.size)) if more else ()
    layout = Layout(24, ring.size, ring.rank, owners)
    k = (layout.positions()[None, :, None, None] + torch.arange(heads)[:, None] * 100).float()
    parts = Messages(ring).gathered(Gather(k, -k[..., :1], groups, owners))
    return [(part.heads, part.k.clone(), part.v.clone()) for part in parts]


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_gather_gives_the_row_in_order(ranks: Ranks, size: int, more: bool) -> None:
    groups = [slice(0, 2), slice(2, 3)]
    for found in ranks(size).run(gathered, 3, groups, more):
        assert [group for group, _, _ in found] == groups
        for group, k, v in found:
            want = torch.arange(24.0)[:, None] + torch.arange(group.start, group.stop) * 100
            assert torch.equal(k[0, :, :, 0], want) and torch.equal(v[0, :, :, 0], -want)


def test_lanes_share_out_the_heads() -> None:
    assert head_halves(8, 4) == [slice(0, 4), slice(4, 8)]
    assert head_halves(5, 2) == [slice(0, 3), slice(3, 5)]
    assert head_halves(1, 8) == [slice(0, 1)] and head_halves(8, 1) == [slice(0, 8)]


def test_groups_are_large_enough_to_launch_and_small_enough_to_hide() -> None:
    ring = Ring(LOCAL)
    ring.__dict__.update(size=4)
    transport = Messages(ring)
    assert (transport.groups, transport.bytes_per_gather) == (2, 2**28)
    k = torch.empty(1, 2**20, 128, 128, dtype=torch.bfloat16, device="meta")

    def largest(length: int, heads: int = 8, asked: int = 0, each: int = 4, chunks: int = 2, seen: int = 0) -> int:
        """``each``: query heads of a key head; ``seen``: of the row's keys, if not all."""
        part, q = k[:, :length, :heads], k[:, :length, :1].expand(-1, -1, each * heads, -1)
        groups = head_groups(q, part, part, transport, asked, seen or 4 * length, length // chunks)
        assert groups[0].start == 0 and groups[-1].stop == heads
        assert all(one.stop == other.start for one, other in itertools.pairwise(groups))
        return max(int(group.stop - group.start) for group in groups)

    assert largest(2**10) == 4 and largest(2**10, heads=3) == 2 and largest(2**10, heads=1) == 1
    assert largest(2**16) == 2**28 // (4 * 2**16 * 256 * 2) == 2
    assert largest(2**20) == 1 and largest(0) == 4
    assert largest(2**10, asked=3) == 3 and largest(2**20, asked=8) == 8

    transport.bytes_per_gather = 2**26
    assert largest(2**15) == 1 and largest(2**13) == 4, "by bytes"
    # With one query head for each key head, or with more chunks, so few bytes would leave little to a launch.
    assert largest(2**14, heads=128, each=1) == QUERIES // 2**13 == 4 > 2**26 // (4 * 2**14 * 256 * 2)
    assert largest(2**13, heads=128, each=1) == SCORES // (2**12 * 4 * 2**13) == 16
    assert largest(2**17, heads=128, each=1, chunks=64) == LARGEST // (2**19 * 256 * 2) == 4 < QUERIES // 2**11
    assert largest(2**15, chunks=16) == QUERIES // (4 * 2**11) == 4
    assert largest(2**15, seen=2**15) == 2**26 // (2**15 * 256 * 2) == 4, "of a sparse plan the keys that arrive count"


def test_heads_of_a_short_attention_are_not_split() -> None:
    """8192 tokens of Llama 3.1 8B on two GPUs; by messages they are, whose transfers take longer."""
    k = torch.empty(1, 2**14, 8, 128, dtype=torch.bfloat16, device="meta")

    def counts(row: int, size: int = 2, pulled: bool = True) -> tuple[int, int]:
        """Groups forward, halves backward."""
        ring = Ring(LOCAL)
        ring.__dict__.update(size=size)
        transport = Messages(ring)
        if pulled:
            transport.bytes_per_gather, transport.whole_below = PULLED, WHOLE
        part = k[:, : row // size]
        q, chunk = part[:, :, :1].expand(-1, -1, 32, -1), row // size // 2
        groups = head_groups(q, part, part, transport, 0, row, chunk)
        return len(groups), len(ring_pass_halves(q, part, transport, chunk))

    assert counts(2**13) == counts(2**14, size=8) == (1, 1)
    assert counts(2**14) == counts(2**15, size=8) == counts(2**13, pulled=False) == (2, 2)


def test_heads_share_a_ring_pass_as_far_as_their_sums_are_small_and_launches_would_be() -> None:
    k = torch.empty(1, 2**20, 128, 128, dtype=torch.bfloat16, device="meta")

    def sizes(length: int, heads: int = 8, each: int = 4, chunks: int = 2) -> list[int]:
        part, q = k[:, :length, :heads], k[:, :length, :1].expand(-1, -1, each * heads, -1)
        groups = ring_pass_groups(q, part, part, length // chunks, 4)
        assert groups[0].start == 0 and groups[-1].stop == heads
        assert all(one.stop == other.start for one, other in itertools.pairwise(groups))
        return [int(group.stop - group.start) for group in groups]

    assert sizes(2**15) == sizes(2**16) == [8] and SUMS == 8 * 2**16 * 256 * 4
    assert sizes(2**17) == [4, 4] and sizes(2**18) == sizes(2**19) == [2] * 4, "two lanes"
    assert sizes(2**15, heads=32, each=1) == [16, 16]
    odd = sizes(2**16, heads=100, each=1)
    assert set(odd) == {7, 8} and len(odd) == 13, "of about one size"
    assert sizes(2**14, heads=128, each=1) == [32] * 4, "by bytes"
    assert sizes(2**16, heads=16, each=1, chunks=512) == [16] and 2 * QUERIES // 2**7 == 512, "two lanes of launches"
    assert sizes(2**10, heads=128, each=1) == [128] and sizes(0) == [8] and sizes(2**20, heads=1) == [1]


def test_a_rank_meets_the_one_before_it_first() -> None:
    ring = Ring(LOCAL)
    ring.__dict__.update(size=4, rank=1)
    assert visiting_order(ring) == [0, 3, 2, 1]


def sent_before_and_after() -> tuple[int, int]:
    """How many gathers have left when keys and values are to be gathered, and when they have been asked for."""
    k, heads = torch.randn(1, 4, 2, 3), [slice(0, 1), slice(1, 2)]
    with mock.patch.object(Ring, "gather", autospec=True, side_effect=Ring.gather) as gather:
        parts = Messages(Ring.of(None)).gathered(Gather(k, k, heads))
        before = gather.call_count
        assert len(list(parts)) == 2
    return before, gather.call_count


def test_the_first_keys_and_values_are_on_their_way_before_anyone_asks_for_them(ranks: Ranks) -> None:
    assert ranks(2).run(sent_before_and_after) == [(2, 4)] * 2


def choices() -> tuple[str, str, str]:
    ring = Ring.of(None)
    refusal = ""
    try:
        traffic_of(ring, CPU, "pulls")
    except NoPulls as error:
        refusal = str(error)
    return type(traffic_of(ring, CPU)).__name__, type(traffic_of(ring, CPU, "messages")).__name__, refusal


def test_without_gpus_there_are_messages_and_pulls_are_refused_by_name(ranks: Ranks) -> None:
    for auto, named, refusal in ranks(2).run(choices):
        assert auto == named == "Messages"
        assert refusal == (
            "RingConfig(traffic='pulls') is not possible: every rank needs an NVIDIA GPU. Use traffic='auto', which "
            "takes messages here; the results are the same bit for bit."
        )


@pytest.mark.parametrize(
    ("batch", "heads", "groups"),
    [(1, 8, [slice(0, 4), slice(4, 8)]), (2, 5, [slice(0, 2), slice(2, 4), slice(4, 5)]), (3, 1, [slice(0, 1)])],
)
def test_what_ranks_lay_out_for_each_other_is_read_back_in_order(batch: int, heads: int, groups: list[slice]) -> None:
    """What pulls copy, with the memory of all ranks in one process."""
    for owners in ((), (2, 0, 1, 1, 3, 0, 2, 3), (3, 1, 0, 2), tuple(range(4)) * 4):
        laid_out(batch, heads, groups, owners)


def laid_out(batch: int, heads: int, groups: list[slice], owners: Owners) -> None:
    size, length, generator = 4, 64, torch.Generator().manual_seed(0)
    k, v = (torch.randn(batch, length, heads, width, generator=generator) for width in (6, 4))
    layouts = [Layout(length, size, rank, owners) for rank in range(size)]
    of_ranks = [(layout.shard(k, 1), layout.shard(v, 1)) for layout in layouts]
    for chunks in (layouts[0].chunks, 0):
        packing = Packing.of(of_ranks[0][0], of_ranks[0][1], groups, chunks)
        memory = [torch.zeros(packing.stops[-1], dtype=torch.uint8) for _ in range(size)]
        for mine, kv in zip(memory, of_ranks, strict=True):
            packing.write(packing.places(mine), *kv)
        shared = packing.views(memory)
        for number, group in enumerate(groups):
            if chunks:
                row = packing.within(packing.empty(k, 0, size), number, size)
                packing.lay_down(row, shared[number], [2, 0, 3, 1], chunks_of(size, owners))
                found, want = [packing.apart(row, number)], [(k, v)]
            else:
                found, want = [packing.apart(x, number) for (x,) in shared[number]], [(x, y) for x, y in of_ranks]
            for pair, whole in zip(found, want, strict=True):
                assert all(torch.equal(x, y[:, :, group]) for x, y in zip(pair, whole, strict=True))


def test_the_first_lane_has_the_most_heads() -> None:
    """Buffers take their room from it."""
    for heads in range(1, 20):
        sizes = [lane.stop - lane.start for lane in head_halves(heads, 4)]
        assert sum(sizes) == heads and sizes == sorted(sizes, reverse=True)
