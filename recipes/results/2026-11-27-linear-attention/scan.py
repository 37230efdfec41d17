"""Times of flash-linear-attention's chunk_gated_delta_rule and of transformers' depthwise convolution, on one GPU.

python scan.py scan.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor
from torch.nn.functional import conv1d, silu

WIDTH = 128


def milliseconds(work: Callable[[], Any], times: int = 5) -> float:
    """The median, after two calls that compile and tune."""
    found = []
    for _ in range(times + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return sorted(found[2:])[times // 2]


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def case(kind: str, tokens: int, heads: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """What is computed over a row, and the tensors whose gradients are."""
    if kind == "conv":
        channels = 2 * WIDTH * heads
        x, weight = drawn(1, channels, tokens), drawn(channels, 1, 4).detach()
        return lambda: silu(conv1d(x, weight, padding=3, groups=channels)[..., :tokens]), [x]
    query, key, value = (drawn(1, tokens, heads, WIDTH) for _ in range(3))
    beta = torch.rand(1, tokens, heads, device="cuda", dtype=torch.bfloat16).requires_grad_()
    decay = (-torch.rand(1, tokens, heads, device="cuda")).requires_grad_()
    return (
        lambda: chunk_gated_delta_rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0],
        [query, key, value, beta, decay],
    )


def main() -> None:
    with open(sys.argv[1], "w") as out:
        for kind, heads in (("gdr", 16), ("conv", 16), ("conv", 32)):
            for tokens in (8192, 32768, 131072):
                torch.manual_seed(0)
                torch.cuda.empty_cache()
                work, inputs = case(kind, tokens, heads)
                before = torch.cuda.memory_allocated()

                @torch.no_grad()
                def forward(work: Callable[[], Tensor] = work) -> None:
                    work()

                def both(work: Callable[[], Tensor] = work, inputs: list[Tensor] = inputs) -> None:
                    y = work()
                    torch.autograd.grad(y, inputs, torch.ones_like(y))

                first = milliseconds(forward)
                torch.cuda.reset_peak_memory_stats()
                second = milliseconds(both)
                peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                row = {"kind": kind, "tokens": tokens, "heads": heads, "width": WIDTH}
                row |= {"forward_ms": first, "both_ms": second, "peak_MiB": peak}
                out.write(json.dumps(row) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
