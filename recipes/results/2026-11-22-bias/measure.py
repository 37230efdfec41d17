"""Speed of score_mod on one GPU: triton beside flex, and triton without one. Prints a line each.

python recipes/results/2026-11-22-bias/measure.py OUTPUT.json
"""

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
SIZES, TIMES = (8192, 32768, 131072), 5
LONGEST = {"flex": 32768}


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
    mod = None if function is None else ScoreMod.of(function, q.device)
    if mod is not None:
        request = Request("cuda", q.dtype, HEADS, KEY_HEADS, WIDTH, WIDTH, False, False, False, score_mod=True)
        part = partial(_part, Mask.of(CAUSAL, 1, tokens), 1, tokens)
        assert choose(kernel.name, asking(request, mod, WIDTH**-0.5, None, part)) is kernel
        mod = mod.with_values(mod.captured, [x.requires_grad for x in mod.captured])
    params = Params(WIDTH**-0.5, score_mod=mod)
    runs = Layout(tokens, 1, 0).whole()
    table = tiles(Mask.of(CAUSAL, 1, tokens), runs, runs)
    out, lse = kernel.forward(q, k, v, table, params)
    delta = kernel.delta(dout, out)
    dq, dk, dv = (kernel.new_gradient(x) for x in (q, k, v))
    into = Gradients(dq, dk, dv, extra={} if mod is None else mod.new_gradients())

    def backward() -> None:
        kernel.backward(dout, q, k, v, lse, delta, table, params, into, out)

    forward = milliseconds(lambda: kernel.forward(q, k, v, table, params), times)
    return {
        "function": name, "kernel": kernel.name, "tokens": tokens, "forward_ms": forward,
        "backward_ms": milliseconds(backward, times), "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }  # fmt: skip


def main() -> None:
    functions = {
        "none": None, "fixed ALiBi slopes": Alibi(HEADS), "learned ALiBi slopes": Alibi(HEADS, learnable=True),
        "T5's bias": RelativeBias(HEADS),
    }
    rows = []
    for tokens in SIZES:
        for name, function in functions.items():
            for kernel in ("triton",) if function is None else ("triton", "flex"):
                if tokens > LONGEST.get(kernel, tokens):
                    continue
                torch.cuda.reset_peak_memory_stats()
                try:
                    on = None if function is None else function.cuda()
                    rows.append(measured(name, on, tokens, KERNELS[kernel], TIMES if tokens < SIZES[-1] else 2))
                except Exception as error:  # noqa: BLE001  # the next row may run
                    rows.append({"function": name, "kernel": kernel, "tokens": tokens, "error": str(error)[:300]})
                print(rows[-1], flush=True)
    Path(sys.argv[1]).write_text(json.dumps({**facts(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
