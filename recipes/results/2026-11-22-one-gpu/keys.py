"""Time of triton's backward on one GPU: what keys.txt holds, of the sums before and after, two turns each.

python recipes/results/2026-11-22-one-gpu/keys.py
"""

from __future__ import annotations

import statistics

import torch
from hf_ring_attn.layout import Layout
from hf_ring_attn.mask import CAUSAL, Mask, tiles

from hf_ring_attn.kernels import KERNELS, Gradients, Params

SHAPES = (
    (2048, 32, 8, 128), (8192, 32, 8, 128), (32768, 32, 8, 128), (32768, 64, 8, 64), (32768, 16, 8, 256),
    (131072, 32, 8, 128),
)  # fmt: skip


def main() -> None:
    kernel = KERNELS["triton"]
    for tokens, heads, kv_heads, width in SHAPES:
        q, k, v, dout = (
            torch.randn(1, tokens, count, width, device="cuda", dtype=torch.bfloat16)
            for count in (heads, kv_heads, kv_heads, heads)
        )
        runs = Layout(tokens, 1, 0).whole()
        table, params = tiles(Mask.of(CAUSAL, 1, tokens), runs, runs), Params(width**-0.5)
        out, lse = kernel.forward(q, k, v, table, params)
        delta, into = kernel.delta(dout, out), Gradients(*(kernel.new_gradient(x) for x in (q, k, v)))
        count = max(3, min(50, int(3e11 / (tokens**2 * heads * width / 128))))
        times = []
        for turn in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count if turn else 3):
                kernel.backward(dout, q, k, v, lse, delta, table, params, into, out)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / count)
        ms = statistics.median(times[1:])
        print(tokens, heads, width, f"{ms:.3f} ms {tokens**2 * heads * width * 5 / ms / 1e9:.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
