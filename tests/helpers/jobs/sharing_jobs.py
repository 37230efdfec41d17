"""What ranks run to see what layers that share keys and values send, and how long what they gathered lives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import hf_ring_attn
from hf_ring_attn.comm.ring import Pending, Ring
from hf_ring_attn.integration.context import shared_kv
from hf_ring_attn.sharding import plan
from hf_ring_attn.traffic import GatheredKV
from tests.helpers.jobs import compile_jobs
from tests.helpers.jobs.compile_jobs import Compiled
from tests.helpers.jobs.plain_jobs import Batch, Step, gradients_of, ready, tokens

AGREED = "compared its model with the other ranks"
"""The one small message of each batch, which is not about keys and values."""


@contextmanager
def sparse() -> Iterator[None]:
    """Ranks are sent what they see, whatever its share; rows are shorter than a block of keys here."""
    plan._cached.cache_clear()
    with mock.patch.object(plan, "SPARSE_SHARE", 1), mock.patch.object(plan, "KEY_BLOCK", 4):
        yield
    plan._cached.cache_clear()


@dataclass
class Wire:
    """What a rank receives: of each message what it was for, and its bytes."""

    messages: list[tuple[str, int]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        gather, exchange, send_on = Ring.gather, Ring.all_to_all, Ring.send_on

        def gathers(ring: Ring, x: Tensor, doing: str = "gathered keys and values") -> Pending:
            if doing != AGREED:
                self.messages.append((doing, x.nbytes * (ring.size - 1)))
            return gather(ring, x, doing)

        def exchanges(ring: Ring, x: Tensor, sends: list[int], receives: list[int], doing: str) -> Pending:
            row = x[0].nbytes if len(x) else 0
            self.messages.append((doing, row * (sum(receives) - receives[ring.rank])))
            return exchange(ring, x, sends, receives, doing)

        def sends(ring: Ring, xs: Any, doing: str) -> Pending:
            self.messages.append((doing, sum(x.nbytes for x in xs)))
            return send_on(ring, xs, doing)

        with (
            mock.patch.object(Ring, "gather", gathers),
            mock.patch.object(Ring, "all_to_all", exchanges),
            mock.patch.object(Ring, "send_on", sends),
        ):
            yield

    def taken(self) -> list[tuple[str, int]]:
        messages, self.messages = self.messages, []
        return messages


@dataclass
class Memory:
    """What was kept. ``most``: how many gathers there were of which something was kept at one time."""

    most: int = 0
    storages: list[weakref.ref[Any]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        filling, alive = GatheredKV.filling, weakref.WeakSet[GatheredKV]()

        def watching(kept: GatheredKV, gathered: Any) -> Iterator[Any]:
            alive.add(kept)
            for part in filling(kept, gathered):
                self.storages += [weakref.ref(x.untyped_storage()) for x in (part.k, part.v)]
                self.most = max(self.most, len(alive))
                yield part

        with mock.patch.object(GatheredKV, "filling", watching):
            yield

    def left(self) -> int:
        """Of how many tensors there is still memory."""
        return sum(storage() is not None for storage in self.storages)


@dataclass
class Found:
    """Of a step, forward and backward apart: messages, and the tensors that were kept and still there at its end."""

    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]
    most: int
    left: list[int]
    numbers: dict[str, Tensor]


def measured(step: Step, few: bool = False) -> Found:
    """A step inside the batch's context, backward too. ``few``: in sparse plans."""
    model, wire, memory = ready(step, "ring_fp32").eval(), Wire(), Memory()
    model.train(bool(step.checkpointing))
    sharded = hf_ring_attn.shard(step.batch, config=step.ring)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(shared_kv, "_traced", False))  # by another test
        if few:
            stack.enter_context(sparse())
        stack.enter_context(sharded)
        with torch.no_grad():  # the model is looked at, and checked, before anything is counted
            model(**sharded.inputs)
        stack.enter_context(wire.watched())
        stack.enter_context(memory.watched())
        gc.disable()  # memory must go by itself
        out = model(**sharded.inputs)
        forward, left = wire.taken(), [memory.left()]
        out.loss.backward()
        backward = wire.taken()
        left.append(memory.left())
        gc.enable()
    numbers = {"loss": out.loss.detach(), "logits": out.logits.detach(), **gradients_of(model)}
    return Found(forward, backward, memory.most, left, numbers)


def autocast(step: Step) -> Found:
    with torch.autocast("cpu", torch.bfloat16):
        return measured(step)


def gathers(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """How many gathers of keys and values there were meanwhile, and what the function returned."""
    wire = Wire()
    with wire.watched():
        answer = function(*args)
    return sum(doing == "gathered keys and values" for doing, _ in wire.messages), answer


# ---- compiled --------------------------------------------------------------------------------------------------------


@dataclass
class Beside:
    """A batch of a compiled model (``got``) and of one that is not and whose layers gather for themselves (``each``):
    what was sent forward and backward, and whether numbers are the same bits.

    Args:
        graphs: how many there were after it.
        most, left: as in `Found`; left after the forward.
    """

    got: list[list[tuple[str, int]]]
    each: list[list[tuple[str, int]]]
    same: bool
    graphs: int
    most: int
    left: int


def compiled(case: Compiled, few: bool = False, given_up: bool = False) -> list[Beside]:
    """Steps of a compiled model.

    Args:
        few: in sparse plans.
        given_up: after the first batch the compiled model runs uncompiled on the last rank.
    """
    torch._dynamo.reset()
    counter, wire, memory, found = CompileCounterWithBackend(case.backend), Wire(), Memory(), []
    each = replace(case, ring=replace(case.ring, heads_per_gather=1))
    last = dist.get_rank() + 1 == dist.get_world_size()
    stance = "force_eager" if given_up and last else "default"

    def step(model: Any, batch: Batch, of: Compiled) -> tuple[list[list[tuple[str, int]]], int, dict[str, Tensor]]:
        with wire.watched():
            there = compile_jobs.forward(model, batch, of, named=True)
            messages = [[message for message in wire.taken() if "its batch" not in message[0]]]
            left = memory.left()
            numbers = compile_jobs.backward(model, *there)
            return [*messages, wire.taken()], left, numbers

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(shared_kv, "_traced", False))
        if few:
            stack.enter_context(sparse())
        plain, quick = compile_jobs.ready(each), compile_jobs.fast(case, counter)
        for model in (plain, quick):  # which are looked at, and checked, before anything is counted
            step(model, case.batches[0], case)
        for batch in case.batches:
            other, _, want = step(plain, batch, each)
            with memory.watched(), torch.compiler.set_stance(stance):
                messages, left, got = step(quick, batch, case)
            same = all(torch.equal(got[name], x) for name, x in want.items())
            found.append(Beside(messages, other, same, counter.frame_count, memory.most, left))
    return found


def by_bits(who: int) -> tuple[bool, bool]:
    """Whether layers go by their bits after a batch, before and once rank ``who`` alone has compiled anything."""
    found = []
    with mock.patch.object(shared_kv, "_traced", False), mock.patch.dict(counters["frames"], clear=True):
        for compiles in (False, dist.get_rank() == who):
            if compiles:
                torch.compile(torch.sin, backend="eager")(torch.ones(3))
            hf_ring_attn.shard(tokens(9))
            found.append(shared_kv._traced)
    return found[0], found[1]
