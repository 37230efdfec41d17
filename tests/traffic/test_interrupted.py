"""An attention that ended half-way on some rank, by an error that was caught: the ring is refused from then on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.comm.ring import LOCAL, Pending, Ring
from hf_ring_attn.comm.sparse_exchange import Exchange
from hf_ring_attn.config import RingConfig
from hf_ring_attn.errors import LeftHalfway, PeerLost
from hf_ring_attn.kernels.reference import Reference
from hf_ring_attn.sharding.plan import SegmentTable, Tables
from hf_ring_attn.traffic import Gather, Messages, seen_by_heads
from hf_ring_attn.traffic.interrupted import InterruptionGuard
from tests.helpers.checks import Ranks
from tests.helpers.rank_functions import held, qkv

NOTHING = torch.empty(0)
TOKENS, HALVES = 4, [slice(0, 2), slice(2, 3)]

Way = Callable[[Ring, Tensor], Iterator[Any]]


@contextmanager
def ring_of_its_own() -> Iterator[Ring]:
    """Since nothing of a ring can be used that was left half-way."""
    ring = Ring.of(dist.new_group())
    yield ring
    dist.barrier()  # a rank may wait for what another one has sent: then it must not be gone yet
    dist.destroy_process_group(ring.group)


def gather(ring: Ring, k: Tensor) -> Iterator[Any]:
    return Messages(ring).gathered(Gather(k, k, HALVES))


def ring_pass(ring: Ring, k: Tensor) -> Iterator[Any]:
    return Messages(ring).ring_pass(k, k, HALVES, lambda _source, lane: (k[:, :, lane].clone(), k[:, :, lane].clone()))


def exchange(ring: Ring, k: Tensor) -> Iterator[Any]:
    """Every rank sends all its tokens to everyone."""
    all_of = [TOKENS] * ring.size
    everyone = Exchange(all_of, all_of, torch.arange(TOKENS).repeat(ring.size), torch.arange(TOKENS * ring.size))
    tables = Tables(
        NOTHING, SegmentTable(NOTHING, False), SegmentTable(NOTHING, False), exchange=everyone, most=TOKENS * ring.size
    )
    return seen_by_heads(Messages(ring), tables, k, k, k, 2)


WAYS: dict[str, Way] = {"a gather": gather, "a ring pass": ring_pass, "an exchange": exchange}


def refused(way: Way, ring: Ring, k: Tensor) -> bool:
    try:
        assert list(way(ring, k))
    except LeftHalfway:
        return True
    return False


def left(way: str) -> tuple[list[bool], list[bool], bool]:
    """Whether each way is refused after this one ended half-way, in that ring; then in a new one and in the world's."""
    k = torch.randn(1, TOKENS, 3, 2)
    with ring_of_its_own() as ring:
        assert not any(refused(WAYS[way], ring, k) for _ in range(3)), "those that end are no trouble"
        next(WAYS[way](ring, k))
        before = [refused(each, Ring(ring.name), k) for each in WAYS.values()]
    with ring_of_its_own() as ring:
        afterwards = [refused(each, ring, k) for each in WAYS.values()]
    return before, afterwards, refused(gather, Ring.of(None), k)


@pytest.mark.parametrize("way", WAYS)
def test_after_messages_that_ended_halfway_the_ring_is_refused_and_a_new_one_is_not(ranks: Ranks, way: str) -> None:
    for before, afterwards, others in ranks(2).run(left, way):
        assert before == [True] * 3
        assert afterwards == [False] * 3 and not others


def test_a_ring_of_one_sends_nothing() -> None:
    k, ring = torch.randn(1, TOKENS, 3, 2), Ring(LOCAL)
    for way in (gather, ring_pass):
        next(way(ring, k))
        assert not refused(way, ring, k)


SENDS = {"a gather": "gather", "a ring pass": "send_on", "an exchange": "all_to_all"}


def failing_at(way: str, turn: int, error: type[Exception]) -> bool:
    """Whether a way is refused that was tried before, when its message of this number failed."""
    send, turns = getattr(Ring, SENDS[way]), iter(range(100))

    def failing(*args: Any, **kwargs: Any) -> Pending:
        if next(turns) == turn:
            raise PeerLost("sent", 0, 2) if error is PeerLost else error
        pending: Pending = send(*args, **kwargs)
        return pending

    k = torch.randn(1, TOKENS, 3, 2)
    with ring_of_its_own() as ring:
        with mock.patch.object(Ring, SENDS[way], failing), pytest.raises(error):
            list(WAYS[way](ring, k))
        return refused(WAYS[way], ring, k)


@pytest.mark.parametrize("way", WAYS)
def test_where_no_message_has_left_the_next_attention_is_right(ranks: Ranks, way: str) -> None:
    """Where there was no room for the first, say."""
    assert ranks(2).run(failing_at, way, 0, torch.OutOfMemoryError) == [False, False]
    assert ranks(2).run(failing_at, way, 1, torch.OutOfMemoryError) == [True, True]
    assert ranks(2).run(failing_at, way, 0, PeerLost) == [True, True], "nobody knows what had left"


# ---- attention -------------------------------------------------------------------------------------------------------


def kernel_fails(method: str) -> AbstractContextManager[object]:
    return mock.patch.object(Reference, method, side_effect=torch.OutOfMemoryError)


def last_way_back_fails() -> AbstractContextManager[object]:
    reduce_scatter, turns = Ring.reduce_scatter, iter(range(4))

    def failing(ring: Ring, x: Tensor) -> Tensor:
        if next(turns) == 3:  # keys and values of two groups of heads
            raise torch.OutOfMemoryError
        return reduce_scatter(ring, x)

    return mock.patch.object(Ring, "reduce_scatter", failing)


FAILURES: dict[str, tuple[Callable[[], AbstractContextManager[object]], bool, RingConfig]] = {
    "a forward": (lambda: kernel_fails("forward"), True, RingConfig()),
    "a backward": (lambda: kernel_fails("backward"), False, RingConfig()),
    "a backward by gather": (lambda: kernel_fails("backward"), False, RingConfig(backward="gather")),
    "the last way back": (last_way_back_fails, False, RingConfig(backward="gather")),
}


def caught(failure: str) -> bool:
    """Whether attention is refused that is tried again after an error."""
    fails, forward, config = FAILURES[failure]
    rows = qkv()
    with ring_of_its_own() as ring:
        leaves = [x[:, held(8, ring.rank, ring.size)].requires_grad_() for x in rows.values()]

        def attended(breaks: AbstractContextManager[object]) -> None:
            with breaks if forward else nullcontext():
                out = ring_attention(*leaves, group=ring.group, config=config)
            with breaks if not forward else nullcontext():
                torch.autograd.grad(out.sum(), leaves)

        attended(nullcontext())
        with pytest.raises(torch.OutOfMemoryError):
            attended(fails())
        with mock.patch.object(Ring, "gather", side_effect=AssertionError("something was sent")):
            try:
                attended(nullcontext())
            except LeftHalfway:
                return True
        return False


@pytest.mark.parametrize("failure", FAILURES)
def test_attention_that_ended_halfway_is_not_tried_again(ranks: Ranks, failure: str) -> None:
    """Another rank may have ended it, and would take the messages of one for those of the other."""
    assert ranks(2).run(caught, failure) == [True, True]


# ---- several passes of one attention ---------------------------------------------------------------------------------


BEFORE, AMID, AFTER = "before its first message", "amid its messages", "after its last one"


def passes_of(guard: InterruptionGuard, count: int, fails: int, when: str, sends: bool) -> None:
    """Of that many passes the one of this number fails. ``sends``: begins with a message, not with the ring pass."""

    def at(moment: str) -> None:
        if number == fails and moment == when:
            raise torch.OutOfMemoryError

    pending = Pending(Ring(LOCAL), "", [], ())
    for number in range(count):
        with guard.ring_pass(number, count):
            at(BEFORE)
            guard.sending(lambda: pending)() if sends else guard.begin()
            at(AMID)
            guard.end()
            at(AFTER)


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_attention_of_several_passes_is_half_way_between_them(count: int, sends: bool) -> None:
    """Others go on with the next ring pass, and would take the next attention for it."""
    guard = InterruptionGuard()
    passes_of(guard, count, count, BEFORE, sends)
    guard.check()
    for fails, when in itertools.product(range(count), (BEFORE, AMID, AFTER)):
        guard = InterruptionGuard()
        with pytest.raises(torch.OutOfMemoryError):
            passes_of(guard, count, fails, when, sends)
        over = (fails, when) in ((0, BEFORE), (count - 1, AFTER))  # nothing has left, or all has come
        assert guard.inside is not over, (fails, when)
