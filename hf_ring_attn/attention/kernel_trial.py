"""Tries a kernel on a small attention in a ring of two, simulated on one device, before it is used.

`unsupported` checks shapes and versions only. This trial finds a miscompiled kernel, or one that fails where only a
ring calls it (some heads at a time, accumulators that other ranks began), before the first step: a wrong gradient would
not show in that step's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..kernels import KERNELS, Params, Request
from ..kernels.reference import whole
from ..sharding.layout import Layout
from ..sharding.mask import CAUSAL, Mask, tiles
from ..sharding.plan import Plan
from ..traffic import RingStep, Sums
from ..traffic.simulated import SimulatedTraffic
from .backward import gradients
from .call import Call, Results, RingOptions
from .op import forward

LENGTH, RANKS = 8 * 33, 2
OWNERS = (0, 1, 1, 0, 1, 1, 0, 0)
"""Owners of the row's chunks. More runs of tokens than in a zigzag, as in the balanced layout of packed rows."""
ROWS, KEY_HEADS = 2, 3
FAR = {2: 0.02, 4: 1e-3}
"""Relative error of a wrong attention, by the bytes of an element: bfloat16 rounding makes 0.003."""

Answer = dict[str, Tensor]


@lru_cache(maxsize=256)
def failures_of(kernel: str, request: Request) -> tuple[str, ...]:
    """The errors that ``kernel`` makes here, in words, on a request that it supports; empty if it is right.

    Only on GPUs: on a CPU the reference serves, which is the definition. Not tried with a score_mod.
    """
    if request.device != "cuda" or kernel == "reference" or request.score_mod:
        return ()
    try:
        errors = errors_of(kernel, request, torch.device("cuda", torch.cuda.current_device()))
    except torch.OutOfMemoryError:  # not the kernel's fault
        raise
    except Exception as error:  # noqa: BLE001  any error of a compiler or driver: this kernel cannot serve here
        line = next(iter(f"{error}".splitlines()), "")
        return (f"a small attention failed here: {type(error).__name__}: {line[:200]}",)
    far = FAR[request.dtype.itemsize]
    wrong = [f"{name} by {error:.0%}" for name, error in errors.items() if not error < far]
    return (f"a small attention came out wrong here: {', '.join(wrong)}",) if wrong else ()


def errors_of(kernel: str, request: Request, device: torch.device) -> dict[str, float]:
    """The relative errors of out, lse, dq, dk and dv of a small attention like ``request``."""
    kv_heads = min(request.kv_heads, KEY_HEADS)
    heads = kv_heads * (request.heads // request.kv_heads)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(device, request.dtype)

    q, dout = random(ROWS, LENGTH, heads, request.head_dim), random(ROWS, LENGTH, heads, request.value_dim)
    k, v = (random(ROWS, LENGTH, kv_heads, width) for width in (request.head_dim, request.value_dim))
    sinks = random(heads) if request.sinks else None
    params = Params(
        request.head_dim**-0.5, 3.0 if request.softcap else None, sinks, deterministic=request.deterministic
    )
    ids = torch.arange(LENGTH, device="cpu") // 50 % 2  # two alternating documents
    mask = Mask.of(CAUSAL, ROWS, LENGTH, ids.expand(ROWS, -1) if request.holes else None)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        got = simulate_ring(kernel, q, k, v, dout, mask, params)
        exact = Params(params.scale, params.softcap, None if sinks is None else sinks.double())
        row = Layout(LENGTH, 1, 0).whole()
        q, k, v, dout = (x.double() for x in (q, k, v, dout))
        want = whole(KERNELS["reference"], q, k, v, dout, tiles(mask, row, row), exact)
    return {name: float((got[name].double() - x).norm() / x.norm()) for name, x in want.items()}


def simulate_ring(kernel: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, params: Params) -> Answer:
    """The answer of a simulated ring of two for whole rows, computed by the ring's own code.

    Ranks run one after another, twice: what a rank receives is known only after the other has run."""
    found: list[Answer] = []
    began: list[dict[tuple[int, int], Sums]] = [{}, {}]
    for _ in range(2):
        found = []
        arriving, began = began, [{}, {}]
        for rank in range(RANKS):
            layout = Layout(LENGTH, RANKS, rank, OWNERS)
            traffic = _Traffic(layout, (k, v), arriving[1 - rank], began[rank])
            plan = Plan.of(traffic.ring, layout, mask, sparse_share=0)
            my_q, my_k, my_v, my_dout = (layout.shard(x, 1) for x in (q, k, v, dout))
            call = Call(my_q, my_k, my_v, plan, params, RingOptions(kernel))
            out, lse = forward(call, traffic, KERNELS[kernel])
            dq, dk, dv, _ = gradients(call, Results(out, lse, my_dout), traffic, KERNELS[kernel])
            found.append({"out": out, "lse": lse.transpose(1, 2), "dq": dq, "dk": dk, "dv": dv})
    row = Layout(LENGTH, RANKS, 0, OWNERS)
    rows = {name: row.merge(torch.stack([one[name] for one in found])) for name in found[0]}
    return {**rows, "lse": rows["lse"].transpose(1, 2)}


class _Traffic(SimulatedTraffic):
    """A `Traffic` whose messages are dictionaries.

    Args:
        arriving: accumulators of the other rank, by source and first head; empty in the first run.
        began: stores this rank's accumulators.
    """

    groups = 2

    def __init__(
        self, layout: Layout, row: Sequence[Tensor], arriving: dict[tuple[int, int], Sums],
        began: dict[tuple[int, int], Sums],
    ) -> None:  # fmt: skip
        super().__init__(layout, row)
        self._arriving, self._began = arriving, began

    def ring_pass(
        self, k: Tensor, v: Tensor, halves: list[slice], new: Callable[[int, slice], Sums], two_streams: bool = False
    ) -> Generator[RingStep]:
        def sums(source: int, half: slice) -> Sums:
            at = source, half.start
            found = self._arriving.get(at) if source == self.ring.rank else None
            return self._began.setdefault(at, found or new(source, half))

        return self.steps(halves, sums)
