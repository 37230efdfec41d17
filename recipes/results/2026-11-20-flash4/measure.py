"""Speed of flash4 on one Hopper GPU beside flash-attn-4 as it is shipped, in the same run.

    python recipes/results/2026-11-20-flash4/measure.py OUT.json

TFLOP/s count S^2 H (D + Dv) for a causal forward and S^2 H (3 D + 2 Dv) for its backward, or the unmasked pairs of
other masks. A ring's rank is played without traffic: all its steps one after the other, delta, zero-filling
and the last rounding included. Medians of rounds that take the variants in turn.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
from hf_ring_attn.mask import CAUSAL, UNBOUNDED, Band, Mask

from hf_ring_attn.bench.replay import Rank, places
from hf_ring_attn.kernels import KERNELS, Gradients, Params

KERNEL = KERNELS["flash4"]
ROUNDS = 7


def pairs(mask: Mask, length: int) -> int:
    """Visible pairs of a row, a document at a time."""
    ((band, rows),) = mask.terms
    (segments, _), *_ = rows
    hi = min(band.hi, length)
    total = 0
    for start, stop, _ in segments:
        n = stop - start
        full = min(n, hi + 1)
        total += full * (full + 1) // 2 + (n - full) * full
    return total


def timed(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each, the variants taken in turn."""
    for call in calls.values():
        for _ in range(2):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(1_000_000)  # half a millisecond, in which the host gets ahead, as it is in training
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(some) for name, some in times.items()}


def tensors(length: int, heads: tuple[int, int], widths: tuple[int, int], batch: int = 1) -> list[Tensor]:
    shapes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]), (heads[0], widths[1])]
    return [torch.randn(batch, length, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def ring(mask: Mask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, size: int, rank: int, params: Params) -> tuple[
    Callable[[], object], Callable[[], object], Callable[[], object]
]:  # fmt: skip
    """A rank's forward, its backward, and the calls of the main kernel alone."""
    me = Rank.of(q.shape[1], size, rank, mask)
    held = [Rank.of(q.shape[1], size, r, mask).held.cuda() for r in range(size)]
    mine, d = q[:, held[rank]], dout[:, held[rank]]
    chunks = [(k[:, h].contiguous(), v[:, h].contiguous()) for h in held]
    out, lse = KERNEL.forward(mine, k, v, me.forward, params)
    delta = KERNEL.delta(d, out)
    home = [places(mine, *chunk, me.queries, keys, params.scale) for chunk, keys in zip(chunks, me.keys, strict=True)]

    def forward() -> object:
        return KERNEL.forward(mine, k, v, me.forward, params)

    def backward() -> object:
        dq = KERNEL.new_gradient(mine, home[0][0])
        statistic = KERNEL.delta(d, out)  # a new tensor, so it and lse are laid out again, as in every real backward
        into = None
        for step in range(size):
            source = (rank - step) % size
            kk, vv = chunks[source]
            at = home[source]
            into = Gradients(dq, KERNEL.new_gradient(kk, at[1]), KERNEL.new_gradient(vv, at[2]), at)
            KERNEL.backward(d, mine, kk, vv, lse, statistic, me.backward[source], params, into)
        assert into is not None
        at = home[rank]
        return [KERNEL.finish(x, q.dtype, p) for x, p in zip((dq, into.dk, into.dv), at, strict=True)]

    kept = [
        Gradients(KERNEL.new_gradient(mine, at[0]), KERNEL.new_gradient(kk, at[1]), KERNEL.new_gradient(vv, at[2]), at)
        for (kk, vv), at in zip(chunks, home, strict=True)
    ]

    def main() -> object:
        for source, ((kk, vv), into) in enumerate(zip(chunks, kept, strict=True)):
            KERNEL.backward(d, mine, kk, vv, lse, delta, me.backward[source], params, into)
        return None

    return forward, backward, main


def stock(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, params: Params, window: int | None, ids: Tensor | None
) -> tuple[Callable[[], object], Callable[[], object]]:
    """flash-attn-4's own functions: dense, or with its cu_seqlens; gradients in bfloat16."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    more: dict[str, object] = {"causal": True}
    if window is not None:
        more = {"window_size_left": window, "window_size_right": 0}
    if ids is not None:
        counts = torch.unique_consecutive(ids[0], return_counts=True)[1]
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().cuda()
        most = int(counts.max())
        more |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": most, "max_seqlen_k": most}
        q, k, v, dout = q[0], k[0], v[0], dout[0]
    out, lse = _flash_attn_fwd(q, k, v, return_lse=True, softcap=params.softcap, **more)[:2]
    cap = params.softcap or 0.0

    def forward() -> object:
        return _flash_attn_fwd(q, k, v, return_lse=True, softcap=params.softcap, **more)

    def backward() -> object:
        return _flash_attn_bwd(q, k, v, out, dout, lse, softcap=cap, deterministic=params.deterministic, **more)

    return forward, backward


def documents(length: int, each: list[int]) -> Tensor:
    counts: list[int] = []
    while sum(counts) < length:
        counts.append(min(each[len(counts) % len(each)], length - sum(counts)))
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[None]


def mixed(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    sizes = (2 ** (8 + 5 * torch.rand(400, generator=generator))).int().tolist()
    return documents(length, sizes)


def row(
    name: str, length: int, heads: tuple[int, int], widths: tuple[int, int], *, size: int = 1, rank: int = 0,
    band: Band = CAUSAL, ids: Tensor | None = None, with_stock: bool = False, softcap: float | None = None,
    deterministic: bool = False,
) -> dict[str, object]:  # fmt: skip
    q, k, v, dout = tensors(length, heads, widths)
    mask = Mask.of(band, 1, length, ids)
    params = Params(widths[0] ** -0.5, softcap, None, deterministic)
    forward, backward, main = ring(mask, q, k, v, dout, size, rank, params)
    calls = {"forward": forward, "backward": backward, "main": main}
    if with_stock:
        window = None if band.hi >= UNBOUNDED else band.hi
        calls["stock forward"], calls["stock backward"] = stock(q, k, v, dout, params, window, ids)
    seconds = timed(calls)
    me = Rank.of(length, size, rank, mask)
    share = visible(me.forward) if size > 1 else pairs(mask, length)
    flops = {"forward": 2 * share * heads[0] * sum(widths)}
    flops["backward"] = flops["main"] = 2 * share * heads[0] * (3 * widths[0] + 2 * widths[1])
    got: dict[str, object] = {"name": name, "length": length, "heads": heads, "widths": widths, "ring": size}
    for kind, second in seconds.items():
        got[kind] = flops[kind.removeprefix("stock ")] / second / 1e12
        got[kind + " ms"] = second * 1e3
    torch.cuda.synchronize()
    start = time.perf_counter()
    main()
    got["host us per step"] = (time.perf_counter() - start) * 1e6 / size
    torch.cuda.synchronize()
    return got


def visible(tiles: Tensor) -> int:
    """Pairs that the tiles show."""
    total = 0
    for _, _, queries, q_at, _, keys, k_at, lo, hi in tiles.tolist():
        place = torch.arange(q_at, q_at + queries)
        first = (place - hi).clamp(min=k_at) if hi < UNBOUNDED else torch.full_like(place, k_at)
        last = (place - lo).clamp(max=k_at + keys - 1)
        total += int((last - first + 1).clamp(min=0).sum())
    return total


LLAMA, W128 = (32, 8), (128, 128)
S32, S128 = 32768, 131072
ROWS: list[Callable[[], dict[str, object]]] = [
    lambda: row("causal 8K", 8192, LLAMA, W128, with_stock=True),
    lambda: row("causal 32K", S32, LLAMA, W128, with_stock=True),
    lambda: row("causal 128K", S128, LLAMA, W128, with_stock=True),
    lambda: row("causal 32K, rank 3 of 8", S32, LLAMA, W128, size=8, rank=3),
    lambda: row("causal 64K, rank 3 of 8", 2 * S32, LLAMA, W128, size=8, rank=3),
    lambda: row("causal 128K, rank 3 of 8", S128, LLAMA, W128, size=8, rank=3),
    lambda: row("causal 256K, rank 3 of 8", 2 * S128, LLAMA, W128, size=8, rank=3),
    lambda: row("causal 32K, chunks of 2045, rank 3 of 8", S32 - 48, LLAMA, W128, size=8, rank=3),
    lambda: row("causal 128K, chunks of 8189, rank 3 of 8", S128 - 48, LLAMA, W128, size=8, rank=3),
    lambda: row("documents of 8192, 32K", S32, LLAMA, W128, ids=documents(S32, [8192]), with_stock=True),
    lambda: row("documents of 2048, 32K", S32, LLAMA, W128, ids=documents(S32, [2048]), with_stock=True),
    lambda: row("documents of 256 to 8192, 32K", S32, LLAMA, W128, ids=mixed(S32), with_stock=True),
    lambda: row("documents of 256 to 8192, 128K", S128, LLAMA, W128, ids=mixed(S128), with_stock=True),
    lambda: row("documents of 256 to 8192, 128K, rank 3 of 8", S128, LLAMA, W128, size=8, rank=3, ids=mixed(S128)),
    lambda: row(
        "documents of 33333, 128K, rank 3 of 8", S128, LLAMA, W128, size=8, rank=3, ids=documents(S128, [33333])
    ),
    lambda: row("window 1024, 32K", S32, LLAMA, W128, band=Band(0, 1023), with_stock=True),
    lambda: row("window 4096, 32K", S32, LLAMA, W128, band=Band(0, 4095), with_stock=True),
    lambda: row("window 4096, 128K, rank 3 of 8", S128, LLAMA, W128, size=8, rank=3, band=Band(0, 4095)),
    lambda: row("32/32 heads, 16K", 16384, (32, 32), W128, with_stock=True),
    lambda: row("32/32 heads, 128K, rank 3 of 8", S128, (32, 32), W128, size=8, rank=3),
    lambda: row("D 64, 64/8 heads, 16K", 16384, (64, 8), (64, 64), with_stock=True),
    lambda: row("D 64, 64/8 heads, 128K, rank 3 of 8", S128, (64, 8), (64, 64), size=8, rank=3),
    lambda: row("D 96, 32/8 heads, 16K", 16384, (32, 8), (96, 96), with_stock=True),
    lambda: row("D 256, 16/8 heads, 16K", 16384, (16, 8), (256, 256), with_stock=True),
    lambda: row("D 256, 16/8 heads, 128K, rank 3 of 8", S128, (16, 8), (256, 256), size=8, rank=3),
    lambda: row("D 192/128, 32/32 heads, 16K", 16384, (32, 32), (192, 128), with_stock=True),
    lambda: row("D 192/128, 32/32 heads, 128K, rank 3 of 8", S128, (32, 32), (192, 128), size=8, rank=3),
    lambda: row("causal 32K, deterministic", S32, LLAMA, W128, with_stock=True, deterministic=True),
    lambda: row("causal 32K, softcap", S32, LLAMA, W128, with_stock=True, softcap=50.0),
]


def main() -> None:
    results = []
    print(f"{'TFLOP/s':46} {'forward':>8} {'stock':>6} {'backward':>8} {'main':>6} {'stock':>6} {'host us':>8}")
    for make in ROWS:
        try:
            got = make()
        except Exception as error:  # noqa: BLE001  # the other rows are still worth having
            print(f"failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        results.append(got)
        shown = [got.get(name, math.nan) for name in ("forward", "stock forward", "backward", "main", "stock backward")]
        line = "{:46} {:8.0f} {:6.0f} {:8.0f} {:6.0f} {:6.0f} {:8.0f}"
        print(line.format(got["name"], *shown, got["host us per step"]), flush=True)
        torch.cuda.empty_cache()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rounds": ROUNDS}
    Path(sys.argv[1]).write_text(json.dumps({"about": about, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
