"""Speed and error of the Triton kernels on one GPU, beside torch's FlashAttention 2 and FlexAttention in the same run.

python recipes/results/2026-11-21-triton/measure.py OUTPUT.json

Every number is the median of ROUNDS rounds in which the kernels take turns. TFLOP/s count 2 * (D + Dv) operations for a
visible pair of one query head in the forward and 2.5 times that in the backward, whatever a kernel really does. The
backward's time holds that of delta, as in FlashAttention 2.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import triton
from hf_ring_attn.layout import Layout, Run
from hf_ring_attn.mask import CAUSAL, Band, Mask, tiles
from torch import Tensor

from hf_ring_attn.kernels import KERNELS, Gradients, Params
from hf_ring_attn.kernels.triton import launch
from hf_ring_attn.testing import relative_error

TRITON, REFERENCE = KERNELS["triton"], KERNELS["reference"]
ROUNDS = 5
RESULTS: list[dict[str, Any]] = []


class Shape(NamedTuple):
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16


def tensors(shape: Shape, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout."""
    s, h, g, d, dv, dtype = shape
    sizes = ((s, h, d), (keys or s, g, d), (keys or s, g, dv), (s, h, dv))
    q, k, v, dout = (torch.randn(1, *size, device="cuda", dtype=dtype) for size in sizes)
    return q, k, v, dout


def pairs(table: Tensor) -> int:
    """Visible pairs of query and key in a table of tiles."""
    total = 0
    for _, _, t, q, _, s, k, lo, hi in table.tolist():
        distance = q - k + torch.arange(t)
        seen = (distance - lo).clamp(max=s - 1) - (distance - hi).clamp(min=0) + 1
        total += int(seen.clamp(min=0).sum())
    return total


def milliseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """The time of a call in each round: the mean of as many as take 40 ms, one at least."""
    for call in calls.values():
        call()
    once = {name: _mean(call, 1) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(_mean(call, max(1, int(40 / once[name]))))
    return times


def _mean(call: Callable[[], Any], turns: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(turns):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / turns


def report(what: str, times: dict[str, list[float]], operations: dict[str, float]) -> None:
    for name, all_times in times.items():
        rate = operations[name] / statistics.median(all_times) * 1e-9
        RESULTS.append({"what": what, "kernel": name, "milliseconds": all_times, "tflops": rate})
        spread = (max(all_times) - min(all_times)) / statistics.median(all_times)
        print(f"{what:<46} {name:<28} {rate:7.1f} TFLOP/s   spread {spread:.1%}", flush=True)


def our_calls(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, table: Tensor, params: Params
) -> dict[str, Callable[[], Any]]:
    out, lse = TRITON.forward(q, k, v, table, params)
    into = Gradients(TRITON.new_gradient(q), TRITON.new_gradient(k), TRITON.new_gradient(v))
    return {
        "triton forward": lambda: TRITON.forward(q, k, v, table, params),
        "triton backward": lambda: TRITON.backward(dout, q, k, v, lse, TRITON.delta(dout, out), table, params, into),
    }


def operations(names: list[str], table: Tensor, shape: Shape) -> dict[str, float]:
    forward = 2.0 * pairs(table) * shape.heads * (shape.head_dim + shape.value_dim)
    return {name: forward * (1 if name.endswith("forward") else 2.5) for name in names}


def masked(
    what: str, shape: Shape, band: Band = CAUSAL, documents: Tensor | None = None, *, peers: bool = False
) -> None:
    """One row under a mask."""
    whole = (Run(0, 0, shape.tokens),)
    table = tiles(Mask.of(band, 1, shape.tokens, documents), whole, whole)
    q, k, v, dout = tensors(shape)
    calls = our_calls(q, k, v, dout, table, Params(shape.head_dim**-0.5))
    if peers:
        calls |= flash_calls(q, k, v, dout)
    report(what, milliseconds(calls), operations(list(calls), table, shape))


def flash_calls(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Callable[[], Any]]:
    """torch's own FlashAttention 2, causal."""
    scale, length = q.shape[3] ** -0.5, q.shape[1]
    forward: Any = torch.ops.aten._flash_attention_forward
    backward: Any = torch.ops.aten._flash_attention_backward
    sizes = (None, None, length, length, 0.0, True)
    out, lse, state, unused, _ = forward(q, k, v, *sizes, False, scale=scale)
    return {
        "flash 2 forward": lambda: forward(q, k, v, *sizes, False, scale=scale),
        "flash 2 backward": lambda: backward(dout, q, k, v, out, lse, *sizes, state, unused, scale=scale),
    }


def flex(shape: Shape) -> None:
    """FlexAttention beside ours, causal. Its backward is forward plus backward less forward."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, dout = tensors(shape)
    whole = (Run(0, 0, shape.tokens),)
    table = tiles(Mask.of(CAUSAL, 1, shape.tokens), whole, whole)
    ours = our_calls(q, k, v, dout, table, Params(shape.head_dim**-0.5))
    sizes = (None, None, shape.tokens, shape.tokens, "cuda")
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, *sizes, _compile=True)
    compiled = torch.compile(flex_attention)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    cotangent = dout.transpose(1, 2)

    def forward() -> Tensor:
        return compiled(*leaves, block_mask=block_mask, enable_gqa=True)

    def both() -> None:
        torch.autograd.grad(forward(), leaves, cotangent)

    both()
    times = milliseconds({"flex forward": forward, "flex both": both, **ours})
    times["flex backward"] = [b - f for b, f in zip(times.pop("flex both"), times["flex forward"], strict=True)]
    report(f"causal, {shape.tokens // 1024}K, 32/8 x 128, with flex", times, operations(list(times), table, shape))


def ring(total: int, size: int, rank: int) -> None:
    """What one rank of a ring does: the gathered forward, and one step of the backward, with the next rank's keys.

    The step's time holds that of delta, which a ring computes only once for all steps.
    """
    layout = Layout(total, size, rank)
    shape = Shape(layout.local_length, 32, 8, 128, 128)
    mask = Mask.of(CAUSAL, 1, total)
    forward_table = tiles(mask, layout.runs(), layout.whole())
    q, k, v, dout = tensors(shape, total)
    calls = {"triton forward": our_calls(q, k, v, dout, forward_table, Params(128**-0.5))["triton forward"]}
    what = f"rank {rank} of {size}, {total // 1024}K in all"
    report(what, milliseconds(calls), operations(list(calls), forward_table, shape))
    table = tiles(mask, layout.runs(), layout.runs((rank + 1) % size))
    q, k, v, dout = tensors(shape)
    calls = {"triton backward": our_calls(q, k, v, dout, table, Params(128**-0.5))["triton backward"]}
    report(what, milliseconds(calls), operations(list(calls), table, shape))


def errors(dtype: torch.dtype, bias: float) -> None:
    """Relative errors against float64 of ours and of FlashAttention 2, with outliers in q, k, v and dout."""
    shape = Shape(4096, 8, 2, 128, 128, dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    given = []
    for x in tensors(shape):
        x = torch.randn(x.shape, device="cuda", generator=generator)
        hit = torch.rand(x.shape, device="cuda", generator=generator) < 1e-3
        given.append(torch.where(hit, 15 * x, x).to(dtype))
    q, k, v, dout = given
    v = v + bias
    table = tiles(Mask.of(CAUSAL, 1, 4096), (Run(0, 0, 4096),), (Run(0, 0, 4096),))
    params = Params(128**-0.5)

    def all_of(kernel: Any, *x: Tensor) -> dict[str, Tensor]:
        out, lse = kernel.forward(*x[:3], table, params)
        wide = torch.float64 if x[0].dtype == torch.float64 else torch.float32
        delta = kernel.delta(x[3], out)
        into = Gradients(*(torch.zeros(y.shape, dtype=wide, device="cuda") for y in x[:3]))
        kernel.backward(x[3], *x[:3], lse, delta, table, params, into)
        return {"out": out, "dq": into.dq, "dk": into.dk, "dv": into.dv}

    want = all_of(REFERENCE, *(x.double() for x in (q, k, v, dout)))
    mine = {name: x.to(dtype) for name, x in all_of(TRITON, q, k, v, dout).items()}
    calls = flash_calls(q, k, v, dout)
    theirs = dict(
        zip(("out", "dq", "dk", "dv"), (calls["flash 2 forward"]()[0], *calls["flash 2 backward"]()), strict=True)
    )
    for name in want:
        a, b = relative_error(mine[name], want[name]), relative_error(theirs[name], want[name])
        what = f"error of {name}, {str(dtype)[6:]}, v biased by {bias}"
        RESULTS.append({"what": what, "triton": a, "flash 2": b, "ratio": a / b})
        print(f"{what:<46} triton {a:.3e}   flash 2 {b:.3e}   ratio {a / b:.3f}", flush=True)


def host() -> None:
    """Microseconds of host time a call."""
    shape = Shape(64, 32, 8, 128, 128)
    whole = (Run(0, 0, 64),)
    calls = our_calls(*tensors(shape), tiles(Mask.of(CAUSAL, 1, 64), whole, whole), Params(128**-0.5))
    for name, call in calls.items():
        for turns in (100, 500):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(turns):
                call()
            microseconds = (time.perf_counter() - began) / turns * 1e6
        RESULTS.append({"what": "host time", "kernel": name, "microseconds": microseconds})
        print(f"host time of {name}: {microseconds:.0f} us", flush=True)
    for documents in (1, 1000):
        length = 2**18
        ids = (torch.arange(length) * documents // length)[None]
        table = tiles(Mask.of(CAUSAL, 1, length, ids), (Run(0, 0, length),), (Run(0, 0, length),))
        began = time.perf_counter()
        q = torch.empty(1, length, 1, 16, device="cuda", dtype=torch.bfloat16)
        problem = launch.Problem.of(q, q, q, table, Params(1.0))
        row = problem.row(True)
        for side, blocks in (("queries", row.forward), ("keys", row.keys)):
            problem.schedule(side, blocks, idle=True, streamed=(q, q))
        problem.bounds()
        milli = (time.perf_counter() - began) * 1e3
        RESULTS.append({"what": f"tables of 256K tokens in {documents} documents, once a batch", "milliseconds": milli})
        print(f"tables of 256K tokens in {documents} documents: {milli:.1f} ms, once a batch", flush=True)


def main() -> None:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    report("matmul 8192 cubed", milliseconds({"cublas": lambda: a @ b}), {"cublas": 2.0 * 8192**3})
    for tokens in (8, 32, 128):
        masked(f"causal, {tokens}K, 32/8 x 128", Shape(tokens * 1024, 32, 8, 128, 128), peers=True)
    flex(Shape(32768, 32, 8, 128, 128))
    k32 = 32 * 1024
    masked("causal, 32K, fp16", Shape(k32, 32, 8, 128, 128, torch.float16))
    masked("causal, 32K, 32/32 x 128", Shape(k32, 32, 32, 128, 128))
    masked("causal, 32K, 64/8 x 64", Shape(k32, 64, 8, 64, 64), peers=True)
    masked("causal, 32K, 16/8 x 256", Shape(k32, 16, 8, 256, 256), peers=True)
    masked("causal, 32K, 32/32 x 192/128", Shape(k32, 32, 32, 192, 128))
    masked("causal, 32K, 32/8 x 96", Shape(k32, 32, 8, 96, 96), peers=True)
    masked("causal, 32K, 32/8 x 80", Shape(k32, 32, 8, 80, 80), peers=True)
    masked("causal, 8K, 32/8 x 128, float32", Shape(8192, 32, 8, 128, 128, torch.float32))
    masked("window of 4096, 32K", Shape(k32, 32, 8, 128, 128), Band(0, 4095))
    masked("window of 512, 32K", Shape(k32, 32, 8, 128, 128), Band(0, 511))
    masked("bidirectional, 32K", Shape(k32, 32, 8, 128, 128), Band())
    for documents in (16, 100):
        masked(
            f"{documents} documents, 32K",
            Shape(k32, 32, 8, 128, 128),
            documents=(torch.arange(k32) * documents // k32)[None],
        )
    for total, rank in ((32, 0), (32, 3), (128, 0), (128, 7)):
        ring(total * 1024, 8, rank)
    for dtype in (torch.bfloat16, torch.float16):
        for bias in (0.0, 3.0):
            errors(dtype, bias)
    host()
    about = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "rounds": ROUNDS,
    }  # fmt: skip
    with open(sys.argv[1], "w") as file:
        json.dump({"about": about, "results": RESULTS}, file, indent=1)


if __name__ == "__main__":
    main()
