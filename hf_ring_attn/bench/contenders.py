"""Contenders of a measurement: this package's ring, one device alone, and one rank without communication."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.backward import gradients
from ..attention.call import Call, Results, RingOptions
from ..attention.op import attend, forward
from ..comm.ring import LOCAL, Ring
from ..kernels import KERNELS
from ..sharding.layout import Layout
from ..sharding.plan import Plan
from ..traffic import RingStep, Sums
from ..traffic.base import PULLED, WHOLE, Gather
from ..traffic.gathered_kv import KVGroup
from ..traffic.simulated import SimulatedTraffic
from ..traffic.two_streams import TwoStreams
from .clock import Timed
from .workload import Workload


class Contender(NamedTuple):
    """A way to compute a workload: its forward, and its forward and backward; ``share``: of the row's flops."""

    forward: Timed
    both: Timed
    share: float


def differentiated(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Sequence[Tensor], share: float,
    inside: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Contender:  # fmt: skip
    """Builds a contender from a function of q, k and v."""
    *given, dout = inputs
    leaves = [x.detach().requires_grad_() for x in given]

    def alone() -> object:
        with torch.no_grad():
            return function(*given)

    both = Timed(lambda: torch.autograd.grad(function(*leaves), leaves, dout), inside)
    return Contender(Timed(alone, inside), both, share)


def options(backwards: Sequence[str], traffics: Sequence[str], heads: Sequence[int]) -> list[RingOptions]:
    """All combinations, for a kernel that is chosen later."""
    return [
        RingOptions("auto", backward, count, traffic)
        for backward, traffic, count in itertools.product(backwards, traffics, heads)
    ]


def name_of(chosen: RingOptions) -> str:
    heads = f" {chosen.heads_per_gather}" if chosen.heads_per_gather else ""
    return f"ring_fp32 {chosen.backward} {chosen.traffic.replace('auto', '')}".rstrip() + heads


def one_device(work: Workload, kernel: str) -> Contender:
    """The same kernel over the whole row, on every device by itself."""
    return in_ring(work, Ring(LOCAL), kernel, RingOptions(kernel))


def in_ring(work: Workload, ring: Ring, kernel: str, chosen: RingOptions) -> Contender:
    layout = Layout(work.tokens, ring.size, ring.rank)
    plan = Plan.of(ring, layout, work.mask(layout))

    chosen = replace(chosen, kernel=kernel)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(Call(q, k, v, plan, work.params(), chosen))[0]

    return differentiated(function, work.inputs(layout.local_length, 0), 1 / ring.size)


class Alone(SimulatedTraffic):
    """A `Traffic` without communication: one rank of a ring, to measure the cost of its own work on one device."""

    groups, bytes_per_gather, whole_below = 2, PULLED, WHOLE

    def __init__(self, layout: Layout, row: Sequence[Tensor]) -> None:
        super().__init__(layout, row)
        self._device = row[0].device
        self._other = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def gathered(self, request: Gather) -> Generator[KVGroup]:
        with self._streams(request.two_streams) as streams:
            for number, part in enumerate(super().gathered(request)):
                yield part._replace(at=streams.turn(number))

    def ring_pass(
        self, k: Tensor, v: Tensor, halves: list[slice], new: Callable[[int, slice], Sums], two_streams: bool = False
    ) -> Generator[RingStep]:
        with self._streams(two_streams) as streams:
            at = {half.start: streams.turn(number) for number, half in enumerate(halves)}
            made: dict[int, Sums] = {}

            def sums(source: int, half: slice) -> Sums:
                if half.start not in made:  # a real rank allocates its accumulators once, too
                    with at[half.start]:
                        made[half.start] = new(source, half)
                return made[half.start]

            for step in self.steps(halves, sums):
                yield step._replace(at=at[step.heads.start])

    def _streams(self, two_streams: bool) -> TwoStreams:
        return TwoStreams(self._other if two_streams else None, self._device)


def without_traffic(work: Workload, ring_size: int, rank: int, kernel: str, heads_per_gather: int = 0) -> Contender:
    """One rank of a ring of ``ring_size``, computed by the ring's own code for GPUs of one machine."""
    layout = Layout(work.tokens, ring_size, rank)
    q, _, _, dout = work.inputs(layout.local_length, 1)
    _, *row, _ = work.inputs(layout.padded, 0)
    traffic = Alone(layout, row)
    plan = Plan.of(traffic.ring, layout, work.mask(layout), sparse_share=0)
    k, v = (layout.shard(x, 1) for x in row)
    call = Call(q, k, v, plan, work.params(), RingOptions(kernel, heads_per_gather=heads_per_gather))

    def one_way() -> tuple[Tensor, Tensor]:
        return forward(call, traffic, KERNELS[kernel])

    def both() -> object:
        out, lse = one_way()
        return gradients(call, Results(out, lse, dout), traffic, KERNELS[kernel])

    return Contender(Timed(one_way), Timed(both), 1 / ring_size)
