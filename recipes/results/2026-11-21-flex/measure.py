"""Speed of score_mod on one GPU: flex beside the reference; learned ALiBi slopes, T5's bias. Prints a line each."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.biases import Alibi, RelativeBias
from hf_ring_attn.functional import _part
from hf_ring_attn.kernels import KERNELS, Params, Request, ScoreMod, asking, choose
from hf_ring_attn.kernels.base import Gradients
from hf_ring_attn.layout import Layout
from hf_ring_attn.mask import CAUSAL, Mask, tiles

HEADS, KEY_HEADS, WIDTH = 32, 8, 128
SIZES = {"flex": (4096, 8192, 32768), "reference": (4096,)}


def milliseconds(call: Any, times: int) -> list[float]:
    call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * times)]
    for at in range(times):
        marks[2 * at].record()
        call()
        marks[2 * at + 1].record()
    torch.cuda.synchronize()
    return sorted(round(marks[2 * at].elapsed_time(marks[2 * at + 1]), 2) for at in range(times))


def measured(name: str, function: Any, tokens: int, kernel: Any, times: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, tokens, heads, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    mod = ScoreMod.of(function, q.device)
    if kernel.name == "flex":
        request = Request("cuda", q.dtype, HEADS, KEY_HEADS, WIDTH, WIDTH, False, False, False, score_mod=True)
        part = partial(_part, Mask.of(CAUSAL, 1, tokens), 1, tokens)
        assert choose("flex", asking(request, mod, WIDTH**-0.5, None, part)) is kernel
    mod = mod.with_values(mod.captured, [x.requires_grad for x in mod.captured])
    params = Params(WIDTH**-0.5, score_mod=mod)
    runs = Layout(tokens, 1, 0).whole()
    table = tiles(Mask.of(CAUSAL, 1, tokens), runs, runs)
    out, lse = kernel.forward(q, k, v, table, params)
    delta = kernel.delta(dout, out)
    dq, dk, dv = (kernel.new_gradient(x) for x in (q, k, v))
    into = Gradients(dq, dk, dv, extra=mod.new_gradients())

    def backward() -> None:
        kernel.backward(dout, q, k, v, lse, delta, table, params, into, out)

    forward = milliseconds(lambda: kernel.forward(q, k, v, table, params), times)
    return {
        "function": name, "kernel": kernel.name, "tokens": tokens, "forward_ms": forward,
        "backward_ms": milliseconds(backward, times), "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }  # fmt: skip


def main() -> None:
    functions = {
        "learned ALiBi slopes": Alibi(HEADS, learnable=True), "fixed ALiBi slopes": Alibi(HEADS),
        "T5's bias": RelativeBias(HEADS),
    }
    rows = []
    for name, function in functions.items():
        for kernel in ("flex", "reference"):
            for tokens in SIZES[kernel]:
                torch.cuda.reset_peak_memory_stats()
                try:
                    rows.append(measured(name, function.cuda(), tokens, KERNELS[kernel], 5 if kernel == "flex" else 1))
                except Exception as error:  # noqa: BLE001  # the next row may run
                    rows.append({"function": name, "kernel": kernel, "tokens": tokens, "error": str(error)[:300]})
                print(rows[-1], flush=True)
    Path(sys.argv[1]).write_text(json.dumps({**facts(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
