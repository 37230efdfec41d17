"""Measures block sizes on the GPU at hand, and prints rows for `hf_ring_attn/kernels/triton/blocks.py`.

python recipes/tune_triton.py [--widths 64 128] [--bias] [--processes 16] [--save times.jsonl] [--like 80]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Container
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from like_gpu import SHARED_MEMORY, compile_like

from hf_ring_attn.kernels import Gradients, Params, ScoreFunction, ScoreMod
from hf_ring_attn.kernels.triton import launch
from hf_ring_attn.kernels.triton.blocks import WIDTHS, Blocks, Row, family_of
from hf_ring_attn.sharding.mask import UNBOUNDED, Tile

WIDE_BLOCKS = tuple(
    Blocks(*sizes)
    for sizes in (
        (128, 128, 8, 3), (128, 128, 8, 2), (128, 128, 8, 1), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 1),
        (128, 64, 4, 3), (128, 64, 4, 2), (64, 128, 8, 2), (64, 128, 8, 1), (64, 128, 4, 2), (64, 64, 8, 2),
        (64, 64, 8, 1), (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 1), (32, 128, 8, 2), (32, 64, 8, 2),
        (32, 64, 8, 1), (64, 32, 4, 2), (64, 32, 8, 2), (64, 32, 8, 1), (64, 16, 8, 1), (128, 16, 8, 1),
        (128, 32, 8, 2), (128, 32, 4, 2), (64, 32, 4, 1), (32, 64, 4, 2), (32, 64, 4, 1), (32, 32, 4, 2),
        (32, 32, 4, 1), (32, 32, 8, 1), (32, 32, 8, 2), (16, 64, 4, 1), (16, 64, 8, 1), (16, 32, 4, 1), (32, 16, 4, 1),
    )
)  # fmt: skip
"""Blocks that are tried for 16-bit inputs."""
NARROW_BLOCKS = tuple(
    Blocks(*sizes)
    for sizes in (
        (128, 32, 8, 1), (64, 64, 8, 1), (64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 8, 1), (64, 32, 4, 2), (64, 32, 4, 1),
        (32, 64, 8, 1), (32, 64, 4, 1), (32, 32, 8, 1), (32, 32, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1),
    )
)  # fmt: skip
"""Blocks that are tried for float32 inputs."""


class Shape(NamedTuple):
    """Tokens of one causal row, query heads, key heads, width of a value."""

    tokens: int
    heads: int
    kv_heads: int
    value_dim: int


SHAPES = {
    (2, 64): Shape(16384, 64, 8, 64), (2, 128): Shape(16384, 32, 8, 128), (2, 192): Shape(16384, 16, 16, 128),
    (2, 256): Shape(16384, 16, 8, 256), (2, 512): Shape(8192, 16, 4, 512),
    (4, 64): Shape(2048, 16, 4, 64), (4, 128): Shape(2048, 8, 4, 128), (4, 256): Shape(2048, 4, 4, 256),
}  # fmt: skip


class Job(NamedTuple):
    """One of the passes with one choice of blocks."""

    what: str
    element_bytes: int
    width: int
    blocks: Blocks
    bias: bool


def tune(
    processes: int = 16,
    widths: Container[int] = WIDTHS,
    bias: bool = False,
    save: Path | None = None,
    like: int | None = None,
) -> dict[tuple[str, int, int], Row]:
    """Times every candidate on the current GPU, prints the table's rows and what each candidate took, best first.

    Args:
        processes: compile this many kernels at once.
        widths: of heads; other rows are left out.
        bias: with a bias by distance (16-bit inputs alone).
        save: writes the milliseconds of every candidate there, a JSON line each.
        like: compile for this compute capability: `compile_like`.

    Returns:
        the rows, as in `blocks.TABLE`, or in `blocks.WITH_BIAS`.
    """
    shapes = [shape for shape in SHAPES if shape[1] in widths and not (bias and shape[0] > 2)]
    jobs = [
        Job(what, element_bytes, width, blocks, bias)
        for element_bytes, width in shapes
        for what in _passes(element_bytes, width)
        for blocks in (WIDE_BLOCKS if element_bytes == 2 else NARROW_BLOCKS)
    ]
    if like is not None:
        compile_like(like)
    begin: Any = (None, ()) if like is None else (compile_like, (like,))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), *begin) as pool:  # fills the disk's cache
        possible = [job for job, runs in zip(jobs, pool.map(_runs, jobs), strict=True) if runs]
    family, rows = family_of(torch.device("cuda")), {}
    for element_bytes, width in shapes:
        best: dict[str, tuple[float, Blocks]] = {}
        for what in _passes(element_bytes, width):
            mine = [job for job in possible if job[:3] == (what, element_bytes, width)]
            timed = sorted((_milliseconds(job), job.blocks) for job in mine)
            if not timed:
                print(f"# {what}, {element_bytes} bytes, width {width}: no candidate runs")
                continue
            best[what] = timed[0]
            if save is not None:
                _write(save, mine[0], timed)
            listing = ", ".join(f"{tuple(blocks)} {milliseconds:.2f}" for milliseconds, blocks in timed[:6])
            print(f"# {what}, {element_bytes} bytes, width {width}, ms: {listing}")
        rows[family, element_bytes, width] = row = _row(best)
        text = ", ".join(f"Blocks{tuple(blocks)}" for blocks in row if blocks is not None)
        print(f"({family!r}, {element_bytes}, {width}): Row({text}),")
    return rows


def _row(best: dict[str, tuple[float, Blocks]]) -> Row:
    ways = [way for way in (("dk and dv",), ("dk", "dv")) if all(what in best for what in way)]
    keys, *values = min(ways, key=lambda way: sum(best[what][0] for what in way))
    return Row(best["forward"][1], best[keys][1], best["dq"][1], best[values[0]][1] if values else None)


def _write(save: Path, job: Job, timed: list[tuple[float, Blocks]]) -> None:
    of = {"pass": job.what, "element_bytes": job.element_bytes, "width": job.width, "bias": job.bias}
    with save.open("a") as file:
        for milliseconds, blocks in timed:
            file.write(json.dumps({**of, "blocks": blocks, "milliseconds": round(milliseconds, 4)}) + "\n")


def _passes(element_bytes: int, width: int) -> tuple[str, ...]:
    """The passes that are timed: dk and dv apart as well where one program could hardly hold both."""
    together = ("forward", "dk and dv", "dq")
    return (*together, "dk", "dv") if element_bytes == 2 and width > 128 else together


def _runs(job: Job) -> bool:
    try:
        _call(job, 256)()
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001  whatever the compiler says, such blocks are no candidate
        return False
    return True


def _milliseconds(job: Job) -> float:
    bench = import_module("triton.testing").do_bench
    return float(bench(_call(job, SHAPES[job.element_bytes, job.width].tokens), 30, 100, return_mode="median"))


def _slopes(heads: int) -> ScoreFunction:
    slopes = torch.linspace(0.01, 1.0, heads, device="cuda")
    return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs()


def _call(job: Job, tokens: int) -> Any:
    """The launch of one pass over a causal row, as a function without arguments."""
    _, heads, kv_heads, value_dim = SHAPES[job.element_bytes, job.width]
    dtype = torch.bfloat16 if job.element_bytes == 2 else torch.float32
    generator = torch.Generator("cuda").manual_seed(0)

    def random(count: int, width: int) -> torch.Tensor:
        return torch.randn(1, tokens, count, width, dtype=dtype, device="cuda", generator=generator)

    q, k, v, dout = (
        random(heads, job.width), random(kv_heads, job.width), random(kv_heads, value_dim), random(heads, value_dim),
    )  # fmt: skip
    table = torch.tensor([Tile(0, 0, tokens, 0, 0, tokens, 0, lo=0, hi=UNBOUNDED)])
    mod = ScoreMod.of(_slopes(heads), q.device) if job.bias else None
    params = Params(job.width**-0.5, score_mod=mod and mod.with_values(mod.captured, [False] * len(mod.captured)))
    row = Row(job.blocks, job.blocks, job.blocks)
    if job.what == "forward":
        return lambda: launch.forward(q, k, v, table, params, row)
    lse = torch.full((1, heads, tokens), -10.0, device="cuda")
    dq, dk, dv = (torch.zeros(x.shape, device="cuda") for x in (q, k, v))
    into = Gradients(dq, dk, dv)
    problem = launch.Problem.of(q, k, v, table, params)
    delta = torch.zeros_like(lse)
    if job.what == "dq":
        return lambda: launch.add_dq(problem, dout, lse, delta, into, job.blocks)
    chosen = {"dk": job.what != "dv", "dv": job.what != "dk"}
    return lambda: launch.add_dk_dv(problem, dout, lse, delta, into, job.blocks, **chosen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--widths", type=int, nargs="+", choices=WIDTHS, default=WIDTHS)
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--like", type=int, choices=SHARED_MEMORY, help="as this compute capability would: like_gpu.py")
    given = parser.parse_args()
    tune(given.processes, given.widths, given.bias, given.save, given.like)
