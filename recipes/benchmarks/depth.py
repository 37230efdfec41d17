"""The gradient at the bottom of a stack of attention layers, by depth and ring size, beside rings that round.

    python recipes/benchmarks/depth.py [--depths 2 16 64] [--all] [--seeds 4] [--kernel flash4] [--save FOLDER]

A layer is x + attention(rms_norm(x) Wq, ... Wk, ... Wv) Wo, causal, with random weights, everything in bf16
(``--stream float32``: the sum of residuals and the norms in float32, as under autocast). Relative error (norm of the
difference over norm) of the gradient of the stack's input against float64, with the same bf16 weights and inputs, for

- one device;
- "ring_fp32": the same forward, the backward of each attention by a ring of W with float32 sums, replayed;
- "rounded backward": the same forward, each hop's contribution to a gradient rounded to bf16, added in float32;
- "rounded forward and backward": partial outs are merged too (ring-flash-attention, torch's ring).

The first three differ in nothing but the attention's backward. "from one" is the relative difference from the first.
A last bit that differs in one layer makes every layer below it round differently, so that in a deep stack any two
orders of adding are as far apart as rounding itself, and errors of single runs scatter: give several ``--seeds`` and
look at the root of the mean square, "of one" being its ratio to one device's, beside the smallest and largest ratio.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_ring_attn.attention.kernel_choice import kernel_for
from hf_ring_attn.bench import results
from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.bench.replay import replay_backward, replay_forward
from hf_ring_attn.bench.rounding import merged_forward, rounded_backward
from hf_ring_attn.kernels import KERNELS, Params, Request
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from hf_ring_attn.testing import mismatch, relative_error

DEPTHS, DEEPEST = (2, 16, 64), 126
"""126 layers are those of Llama 3 405B."""
OURS, BACKWARD, BOTH = "ring_fp32", "rounded backward", "rounded forward and backward"


class Ring(NamedTuple):
    """How attention is computed."""

    kernel: str
    size: int = 1
    way: str = OURS


class Attention(torch.autograd.Function):
    """Causal attention of [B, S, heads, width]. Each pass looks at ``how``: one forward serves many backwards."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: list[Ring]) -> Tensor:
        (ring,) = how
        kernel, params = KERNELS[ring.kernel], Params(q.shape[3] ** -0.5, deterministic=True)
        if ring.way == BOTH:
            out, lse = merged_forward(kernel, q, k, v, ring.size, params, "rounded parts")
        else:
            out, lse = replay_forward(kernel, q, k, v, Mask.of(CAUSAL, *q.shape[:2]), 1, params)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how, ctx.params = how, params
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        (ring,) = ctx.how
        kernel, dout = KERNELS[ring.kernel], gradients[0].contiguous()
        if ring.way == OURS:
            mask = Mask.of(CAUSAL, *q.shape[:2])
            found = replay_backward(kernel, q, k, v, out, lse, dout, mask, ring.size, ctx.params)
        else:
            found = rounded_backward(kernel, q, k, v, out, lse, dout, ring.size, ctx.params, "rounded parts")
        return *found, None


class Stack:
    """Layers of attention; weights are drawn in float64 and rounded to bf16, so that all dtypes have the same.

    Args:
        heads: of queries, and of keys and values.
        stream: the dtype of the residuals' sum and of the norms; that of the layers: ``dtype``.
    """

    def __init__(
        self, depth: int, heads: tuple[int, int], width: int, dtype: torch.dtype, stream: torch.dtype,
        device: torch.device, how: list[Ring], seed: int,
    ) -> None:  # fmt: skip
        self.heads, self.width, self.dtype, self.stream, self.how = heads, width, dtype, stream, how
        size = heads[0] * width
        generator = torch.Generator().manual_seed(seed)
        outs = (size, heads[1] * width, heads[1] * width, size)
        self.layers = [
            [torch.randn(size, n, generator=generator).mul_(size**-0.5).bfloat16().to(device, dtype) for n in outs]
            for _ in range(depth)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        for w_q, w_k, w_v, w_o in self.layers:
            normed = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6).to(self.dtype)
            q, k, v = ((normed @ w).unflatten(-1, (-1, self.width)) for w in (w_q, w_k, w_v))
            out: Tensor = Attention.apply(q, k, v, self.how)  # type: ignore[no-untyped-call]
            x = x + (out.flatten(2) @ w_o).to(self.stream)
        return x


def gradients(stack: Stack, x: Tensor, dout: Tensor, ways: list[Ring]) -> Iterator[tuple[Ring, Tensor]]:
    """The gradient of ``x`` by each way; ways of one forward share it."""
    before: Tensor | None = None
    leaf = x.detach().to(stack.stream).requires_grad_()
    top = leaf
    for ring in ways:
        stack.how[:] = [ring]
        if before is None or ring.way == BOTH:
            top = before = stack(leaf)
        yield ring, torch.autograd.grad(top, leaf, dout.to(stack.stream), retain_graph=True)[0]


def of_seed(
    args: argparse.Namespace, depth: int, stream: torch.dtype, kernel: str, seed: int
) -> Iterator[tuple[Ring, dict[str, float]]]:
    device, heads = torch.device(args.device), tuple(args.heads)
    generator = torch.Generator().manual_seed(1000 + seed)
    shape = 1, args.length, heads[0] * args.width
    x, dout = (torch.randn(shape, generator=generator).bfloat16().to(device) for _ in range(2))
    exact = [Ring("reference")]
    double = Stack(depth, heads, args.width, torch.float64, torch.float64, device, [], seed)
    ((_, want),) = gradients(double, x, dout, exact)
    ways = [Ring(kernel), *(Ring(kernel, n, way) for way in (OURS, BACKWARD, BOTH) for n in args.rings)]
    stack = Stack(depth, heads, args.width, torch.bfloat16, stream, device, [], seed)
    one = None
    for ring, got in gradients(stack, x, dout, ways):
        one = got if one is None else one
        error = relative_error(got, want)
        yield ring, {
            "error": error, "over_one_device": error / relative_error(one, want),
            "from_one_device": relative_error(got, one), "mismatch": mismatch(got, one),
        }  # fmt: skip


def rms(numbers: list[float]) -> float:
    return math.sqrt(sum(x * x for x in numbers) / len(numbers))


def measure(args: argparse.Namespace, depth: int, stream: str, kernel: str) -> list[dict[str, Any]]:
    found: dict[Ring, list[dict[str, float]]] = {}
    for seed in range(args.seeds):
        for ring, numbers in of_seed(args, depth, getattr(torch, stream), kernel, seed):
            found.setdefault(ring, []).append(numbers)
    alone = rms([numbers["error"] for numbers in found[Ring(kernel)]])
    rows = []
    for ring, runs in found.items():
        error = rms([numbers["error"] for numbers in runs])
        rows.append({
            "depth": depth, "stream": stream, "kernel": kernel, "ring_size": ring.size, "way": ring.way,
            "error": error, "over_one_device": error / alone,
            "from_one_device": rms([numbers["from_one_device"] for numbers in runs]),
            "mismatch": sum(numbers["mismatch"] for numbers in runs) / len(runs), "runs": runs,
        })  # fmt: skip
    return rows


HEAD = (
    f"{'depth':>5} {'stream':9s} {'ring':>4} {'way':29s} {'error':>9} {'of one':>7} {'':16s} {'from one':>9} mismatch"
)


def line(row: dict[str, Any]) -> str:
    ratios = [run["over_one_device"] for run in row["runs"]]
    return (
        f"{row['depth']:>5} {row['stream']:9s} {row['ring_size']:>4} {row['way']:29s} {row['error']:9.2e} "
        f"{row['over_one_device']:7.3f} {f'({min(ratios):.3f} to {max(ratios):.3f})':16s} "
        f"{row['from_one_device']:9.2e} {row['mismatch']:8.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--all", action="store_true", help=f"also {DEEPEST} layers")
    parser.add_argument("--rings", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--length", type=int, help="tokens; default: 64, on a GPU 2048")
    parser.add_argument("--heads", type=int, nargs=2, default=(4, 2), metavar=("QUERY", "KEY"))
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--stream", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"])
    parser.add_argument("--seeds", type=int, default=1, help="runs, each with weights and inputs of its own")
    parser.add_argument("--kernel", default="auto", help="as in RingConfig")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    args = parser.parse_args()
    args.length = args.length or (2048 if args.device == "cuda" else 64)
    head = facts()
    request = Request(
        args.device, torch.bfloat16, args.heads[0], args.heads[1], args.width, args.width, softcap=False, sinks=False,
        deterministic=True,
    )  # fmt: skip
    kernel = kernel_for("", args.kernel, request)
    rows = []
    print(HEAD)
    for depth in [*args.depths, *([DEEPEST] if args.all else [])]:
        for stream in args.stream:
            found = measure(args, depth, stream, kernel)
            print("\n".join(map(line, found)), flush=True)
            rows += found
    if args.save:
        shape = {"length": args.length, "heads": list(args.heads), "width": args.width, "seeds": args.seeds}
        results.save(args.save, "depth", {**head, **shape}, rows)


if __name__ == "__main__":
    main()
