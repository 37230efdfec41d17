"""Numerical error of a ring: against the same kernel on one device, and against float64; also of rings that round.

Rings of any size are simulated on one device; a launched ring also runs as it is. "mismatch" is the share of elements
outside rtol 1.3e-6 / atol 1e-5 of one device, the measure of TransformerEngine's pull request 821; "error" is relative
to float64 (norm of the difference over norm), computed in blocks from the same rounded inputs. Kernels run in their
deterministic mode where they have one, so that the order of atomic adds is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attention.call import Call, RingOptions
from ..attention.kernel_choice import kernel_for
from ..attention.op import attend
from ..comm.ring import Ring
from ..errors import Refused
from ..kernels import KERNELS
from ..layers.collectives import gather_sequence
from ..sharding.layout import Layout
from ..sharding.plan import Plan
from ..testing import Case, Inputs, inputs, mismatch, relative_error
from . import contenders, results
from .provenance import facts
from .replay import Answer, replay
from .rounding import WAYS, rounded
from .workload import Workload

SIZES = (1, 2, 4, 8, 16, 32, 64)
PARTS = ("rings", "pr821")
NAMES = ("out", "dq", "dk", "dv")
OURS = "ring_fp32"
BIAS = 5.0
"""Added to all values, so that ``out`` is large compared with the differences its gradients depend on."""
PR_SIZE = 8
PR_FIGURES = {"16-bit sums": {"out": 0.620, "gradients": 0.590}, "rounded parts": {"out": 0.507, "gradients": 0.413}}
"""Mismatch that TransformerEngine's pull request 821 reports, before and after its change."""

Data = tuple[Tensor, Tensor, Tensor, Tensor]


def signed(work: Workload, biased: bool) -> Data:
    """q, k, v and dout [1, S, heads, width]: signed and random, with outliers; ``biased``: with `BIAS` in v."""
    case = Case(
        why="errors of a ring", length=work.tokens, heads=work.heads, kv_heads=work.kv_heads, head_dim=work.width,
        value_dim=work.value_width,
    )  # fmt: skip
    given = _kept(case)
    wide = given["q"], given["k"], given["v"] + BIAS * biased, given["dout"]
    q, k, v, dout = (x.to(work.dtype).to(work.device) for x in wide)
    return q, k, v, dout


@lru_cache(maxsize=1)
def _kept(case: Case) -> Inputs:
    """Caches a case's inputs: large ones take seconds to draw, and every dtype starts from the same."""
    return inputs(case)


def exact(work: Workload, data: Data) -> Answer:
    """The answer in float64, from the same rounded inputs."""
    q, k, v, dout = (x.double() for x in data)
    mask = work.mask(Layout(work.tokens, 1, 0))
    return replay(KERNELS["reference"], q, k, v, dout, mask, 1, replace(work.params(), deterministic=False))


def simulated(work: Workload, kernel: str, data: Data, size: int) -> Answer:
    """The answer of a simulated ring of ``size`` on one device; of 1: the kernel alone."""
    return replay(KERNELS[kernel], *data, work.mask(Layout(work.tokens, 1, 0)), size, work.params())


def live(work: Workload, kernel: str, data: Data, ring: Ring, chosen: RingOptions) -> Answer:
    """The whole row's answer on every rank, computed by the launched ring."""
    layout = Layout(work.tokens, ring.size, ring.rank)
    *leaves, dout = (layout.shard(layout.pad(x, 1), 1) for x in data)
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    plan = Plan.of(ring, layout, work.mask(layout))
    q, k, v = leaves
    out, lse = attend(Call(q, k, v, plan, work.params(), replace(chosen, kernel=kernel)))
    parts = [out.detach(), lse.detach().transpose(1, 2).contiguous(), *torch.autograd.grad(out, leaves, dout)]
    whole, log_sum, dq, dk, dv = (gather_sequence(x, ring, layout) for x in parts)
    return Answer(whole, log_sum.transpose(1, 2), dq, dk, dv)


def compared(got: Answer, one: Answer, want: Answer) -> dict[str, Any]:
    """The numbers of a row."""
    error = {name: relative_error(getattr(got, name), getattr(want, name)) for name in (*NAMES, "lse")}
    of_one = {name: relative_error(getattr(one, name), getattr(want, name)) for name in NAMES}
    return {
        "forward_identical": torch.equal(got.out, one.out) and torch.equal(got.lse, one.lse),
        "mismatch": {name: mismatch(getattr(got, name), getattr(one, name)) for name in (*NAMES, "lse")},
        "error": error,
        "error_over_one_device": max(error[name] / of_one[name] if of_one[name] else 1.0 for name in NAMES),
    }


def of_inputs(
    work: Workload, ring: Ring, name: str, data: Data, *, sizes: Sequence[int], kernel: str,
    chosen: Sequence[RingOptions],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yields result rows of one set of inputs: launched rings on all ranks, everything else on the first alone."""
    work, kernel = _deterministic(work, ring, kernel)
    ran = [(contenders.name_of(one), live(work, kernel, data, ring, one)) for one in chosen if ring.size > 1]
    if ring.rank:
        return
    head = {
        "inputs": name, "dtype": str(work.dtype).removeprefix("torch."), "tokens": work.tokens, "kernel": kernel,
        "heads": [work.heads, work.kv_heads], "widths": [work.width, work.value_width],
        "deterministic": work.deterministic,
    }  # fmt: skip
    one, want = simulated(work, kernel, data, 1), exact(work, data)
    for way, got in ran:
        yield {**head, "ring_size": ring.size, "way": way, "live": True, **compared(got, one, want)}
    for size in sizes:
        yield {**head, "ring_size": size, "way": OURS, "live": False} | compared(
            simulated(work, kernel, data, size), one, want
        )
        for way in WAYS if size > 1 and work.dtype.itemsize == 2 else ():
            got = rounded(KERNELS[kernel], *data, size, work.params(), way)
            yield {**head, "ring_size": size, "way": way, "live": False, **compared(got, one, want)}


def measure(
    works: Sequence[Workload], ring: Ring, parts: Sequence[str], sizes: Sequence[int], kernel: str,
    chosen: Sequence[RingOptions],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yields all rows on the first rank; the others take part and yield none."""
    device = works[0].device
    if "rings" in parts:
        for work in works:
            for name, biased in (("outliers", False), ("biased V", True)):
                data = signed(work, biased)
                yield from of_inputs(work, ring, name, data, sizes=sizes, kernel=kernel, chosen=chosen)
    if "pr821" in parts:
        work = Workload(4096, device, 12, 12, 128, 128)
        found = of_inputs(
            work, ring, "PR 821's case", work.inputs(work.tokens, 0), sizes=[PR_SIZE], kernel=kernel,
            chosen=chosen if ring.size == PR_SIZE else (),
        )  # fmt: skip
        for row in found:
            yield {**row, "the_pr_reports": PR_FIGURES.get(row["way"])}


def run(
    works: Sequence[Workload], ring: Ring, parts: Sequence[str], sizes: Sequence[int], kernel: str,
    chosen: Sequence[RingOptions], save: Path | None,
) -> int:  # fmt: skip
    """Prints the table and saves its rows as the run "errors"; returns the exit code."""
    uneven = [(work.tokens, size) for work in works for size in sizes if size > 1 and work.tokens % (2 * size)]
    if uneven:
        tokens, size = uneven[0]
        sys.stderr.write(f"{tokens} tokens do not fill a zigzag ring of {size}: give a multiple of {2 * size}\n")
        return 2
    head, rows = {**facts(), "ranks": ring.size}, []
    if not ring.rank:
        sys.stdout.write(HEAD + "\n")
    for row in measure(works, ring, parts, sizes, kernel, chosen):
        rows.append(row)
        sys.stdout.write(line(row) + "\n")
        sys.stdout.flush()
        if save:  # after each row, so that an interrupted job leaves its results
            results.save(save, "errors", head, rows)
    return 0


HEAD = (
    f"{'inputs':14s} {'dtype':9s} {'ring':>4} {'way':22s} {'forward':9s} {'mismatch out / dq / dk / dv, %':30s} "
    f"{'error out / dq / dk / dv':40s} of one device's"
)


def line(row: dict[str, Any]) -> str:
    """Formats a row as text."""
    way = row["way"] + (" (live)" if row["live"] else "")
    forward = "same bits" if row["forward_identical"] else "differs"
    share = " / ".join(f"{100 * row['mismatch'][name]:.2f}" for name in NAMES)
    error = " / ".join(f"{row['error'][name]:.2e}" for name in NAMES)
    said = row.get("the_pr_reports")
    figures = f"   the PR: out {said['out']:.1%}, gradients {said['gradients']:.1%}" if said else ""
    return (
        f"{row['inputs']:14s} {row['dtype']:9s} {row['ring_size']:>4} {way:22s} {forward:9s} {share:30s} {error:40s} "
        f"{row['error_over_one_device']:.3f}{figures}"
    )


def _deterministic(work: Workload, ring: Ring, kernel: str) -> tuple[Workload, str]:
    """The workload in deterministic mode and its kernel; unchanged if the kernel has no such mode."""
    fixed = replace(work, deterministic=True)
    try:
        return fixed, kernel_for(ring.name, kernel, fixed.request())
    except Refused:
        return work, kernel_for(ring.name, kernel, work.request())
