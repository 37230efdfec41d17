"""What every rank of tests/gpu/test_pulls_on_gpu.py does: torchrun --nproc_per_node 4 -m tests.gpu.pulls_ranks

Attention in a ring by pulls and by messages, whose bits must be the same, under masks of every kind, and the answer
that of the reference for the whole row in float64, also where ranks exchange only what they see; and fifty backward
passes in deterministic mode of two cases, while other work disturbs the timing, whose bits must be the same too.
More ranks than GPUs share them, by pulls alone: a ring of eight needs one GPU.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from contextlib import nullcontext
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from hf_ring_attn.attention.call import Call, RingOptions
from hf_ring_attn.attention.kernel_choice import kernel_for
from hf_ring_attn.attention.op import attend
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.command_ranks import ranks_per_gpu, world
from hf_ring_attn.kernels import KERNELS, Params, Request
from hf_ring_attn.kernels.reference import whole
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Band, Mask, tiles
from hf_ring_attn.sharding.plan import Plan
from hf_ring_attn.traffic import head_groups, traffic_of
from hf_ring_attn.traffic.base import WHOLE
from hf_ring_attn.traffic.pulls import Pulls
from tests.gpu.verdict import told

REPEATS, FAR = 50, 0.01
"""Deterministic passes; and a relative error that rounding to bfloat16 does not make."""
NAMES = ("out", "lse", "dq", "dk", "dv")


class Case(NamedTuple):
    length: int
    heads: int = 8
    kv_heads: int = 4
    width: int = 128
    value_width: int = 128
    batch: int = 1
    band: Band = CAUSAL
    documents: int = 0
    backward: str = "ring"
    heads_per_gather: int = 0
    kernel: str = "auto"
    sparse: bool = False
    split: bool = True
    """The heads, which in so short rows would be one group and one half."""
    apart: bool = False
    """Heads have ring passes one after the other, as where their sums would be large."""
    chunks: int = 0
    """Chunks that each rank holds, dealt at random; 0 for the zigzag."""


CASES = [
    Case(4096), Case(4096, backward="gather"), Case(4096, heads_per_gather=3), Case(3000, kv_heads=1),
    Case(3000, kv_heads=3, heads=6), Case(2048, width=64, value_width=64, batch=2),
    Case(2048, width=192, value_width=128, heads=4), Case(4096, band=Band(0, 2500)), Case(4096, documents=3),
    Case(4096, batch=2, documents=5), Case(16384, heads=16, kv_heads=8), Case(1024), Case(8192, kv_heads=8),
    Case(4096, kernel="triton"), Case(1000, width=40, value_width=24, kernel="triton"),
    Case(1024, heads=2, kv_heads=2, kernel="reference"),
    Case(4096, documents=3, chunks=4), Case(3000, batch=2, documents=2, chunks=8, backward="gather"),
    Case(4096, kv_heads=3, heads=6, chunks=16), Case(4096, documents=30, chunks=4, sparse=True),
    Case(4096, band=Band(0, 300), sparse=True), Case(3000, documents=40, sparse=True),
    Case(4096, batch=2, documents=50, band=Band(0, 200), sparse=True, heads_per_gather=3),
    Case(2048, width=192, value_width=128, heads=4, band=Band(0, 100), sparse=True),
    Case(4096, band=Band(0, 300), kernel="triton", sparse=True),
    Case(1024, heads=2, kv_heads=2, documents=20, kernel="reference", sparse=True),
    Case(8192, kv_heads=8, apart=True), Case(3000, heads=6, kv_heads=6, documents=3, apart=True),
    Case(2048, width=192, value_width=128, heads=8, kv_heads=8, batch=2, apart=True),
    Case(4096, split=False), Case(8192, kv_heads=8, split=False), Case(3000, kv_heads=3, heads=6, split=False),
    Case(4096, batch=2, documents=5, split=False), Case(4096, documents=30, chunks=4, sparse=True, split=False),
    Case(4096, documents=3, chunks=4, split=False), Case(2048, width=192, value_width=128, heads=4, split=False),
]  # fmt: skip


def layout_of(case: Case, ring: Ring) -> Layout:
    owners = list(range(ring.size)) * case.chunks
    random.Random(case.chunks).shuffle(owners)
    return Layout(case.length, ring.size, ring.rank, tuple(owners))


def mask_of(case: Case, layout: Layout) -> Mask:
    ids = None
    if case.documents or layout.padded > case.length:
        row = torch.arange(case.length) * (case.documents or 1) // case.length
        ids = layout.pad(row.expand(case.batch, -1), 1, -1)
    return Mask.of(case.band, case.batch, layout.padded, ids)


def inputs(case: Case, ring: Ring, seed: int = 0) -> list[Tensor]:
    """This rank's q, k, v and dout."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(seed + ring.rank)
    tokens = layout_of(case, ring).local_length
    shapes = [(case.heads, case.width), (case.kv_heads, case.width), (case.kv_heads, case.value_width)]
    shapes.append((case.heads, case.value_width))
    return [
        torch.randn(case.batch, tokens, *shape, generator=generator, device=device, dtype=torch.bfloat16)
        for shape in shapes
    ]


def answer(case: Case, ring: Ring, traffic: str) -> list[Tensor]:
    layout = layout_of(case, ring)
    plan = Plan.of(ring, layout, mask_of(case, layout), sparse_share=None if case.sparse else 0)
    assert bool(plan.stops[-1]) == case.sparse
    *leaves, dout = inputs(case, ring)
    q, k, v = (x.requires_grad_() for x in leaves)
    request = Request(
        "cuda", torch.bfloat16, case.heads, case.kv_heads, case.width, case.value_width, False, False, True
    )
    kernel = kernel_for(ring.name, case.kernel, request)
    params = Params(case.width**-0.5, deterministic=True)
    options = RingOptions(kernel, case.backward, case.heads_per_gather, traffic)
    least = mock.patch.multiple(head_groups, SUMS=1, QUERIES=1, SCORES=1) if case.apart else nullcontext()
    with mock.patch.object(Pulls, "whole_below", 0 if case.split else WHOLE):
        out, lse = attend(Call(q, k, v, plan, params, options))
        with least:
            return [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout)]


def errors(case: Case, ring: Ring, found: list[Tensor]) -> dict[str, float]:
    """Of this rank's answer, against the reference for the whole row in float64."""
    layout = layout_of(case, ring)
    q, k, v, dout = (layout.merge(ring.gather(x).wait()[0]).double() for x in inputs(case, ring))
    table = tiles(mask_of(case, layout), layout.whole(), layout.whole())
    answer = whole(KERNELS["reference"], q, k, v, dout, table, Params(case.width**-0.5))
    want = [layout.shard(answer[name], 2 if name == "lse" else 1) for name in NAMES]
    far = {}
    for name, x, y in zip(NAMES, found, want, strict=True):
        seen = y.isfinite()  # padding has no log-sum-exp
        far[name] = float((x.double() - y)[seen].norm() / y[seen].norm())
    return far


def main() -> None:
    with world("cuda", may_share=True) as (ring, device):
        failed = tried(ring, device)
    sys.exit(failed)


def tried(ring: Ring, device: torch.device) -> bool:
    assert type(traffic_of(ring, device, "pulls")).__name__ == "Pulls"
    wrong, began = [], time.monotonic()
    messages = ranks_per_gpu() == 1  # between ranks that share a GPU there are none
    cases = [case for case in CASES if messages or case.backward == "ring"]
    for case in cases:
        if ring.rank == 0:
            sys.stderr.write(f"{time.monotonic() - began:.0f} s: {case}\n")
        pulled = answer(case, ring, "pulls")
        sent = answer(case, ring, "messages") if messages else pulled
        different = [name for name, x, y in zip(NAMES, pulled, sent, strict=True) if not torch.equal(x, y)]
        assert all(bool(x.isfinite().all()) for x in (pulled[0], *pulled[2:]))
        wrong += [f"{case}: {', '.join(different)} differ between pulls and messages"] if different else []
        far = {name: error for name, error in errors(case, ring, pulled).items() if not error < FAR}
        wrong += [f"{case}: far from float64: {far}"] if far else []

    repeated = (Case(8192, heads=16, kv_heads=8), Case(8192, heads=6, kv_heads=3))
    transports = ("pulls", "messages") if messages else ("pulls",)
    for traffic, case in itertools.product(transports, repeated):
        first = None
        generator = torch.Generator().manual_seed(ring.rank)
        noise = torch.randn(2048, 2048, device=device)
        beside = torch.cuda.Stream(device)
        for repeat in range(REPEATS):
            with torch.cuda.stream(beside):  # other work, of another length on each rank
                for _ in range(int(torch.randint(0, 6, (), generator=generator))):
                    noise = (noise @ noise).clamp(-1, 1)
            found = answer(case, ring, traffic)
            first = found if first is None else first
            if not all(torch.equal(x, y) for x, y in zip(found, first, strict=True)):
                wrong.append(f"{traffic}, {case}: pass {repeat} has other bits than the first")
                break
    return told(ring, wrong, f"{len(cases)} cases and {2 * len(transports)} x {REPEATS} passes")


if __name__ == "__main__":
    main()
