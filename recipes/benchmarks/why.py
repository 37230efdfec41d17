"""The table of why: what a ring's gradients lose when partial sums are rounded, by ring size, replayed in one process.

    python recipes/benchmarks/why.py [--length 4096] [--device cpu] [--save FILE]

bf16 inputs, causal, grouped queries, one forward pass; then the backward of every rank of a ring of W with three ways
of adding the contributions of its hops:

- "bf16 sums": each contribution is rounded to bf16 and added in bf16 (TransformerEngine's p2p, as released);
- "bf16 partials": each contribution is rounded to bf16 and added in float32 (ring-flash-attention, torch's ring);
- "float32": contributions are added in float32 and rounded once, at home (this package).

"mismatch" is the share of elements outside rtol 1.3e-6 / atol 1e-5 of the same kernel on one device, the measure of
TransformerEngine PR 821. "error" is relative to float64 (norm of the difference over norm).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.kernels import KERNELS, Gradients, Params
from hf_ring_attn.layout import Layout
from hf_ring_attn.mask import CAUSAL, Mask, tiles
from hf_ring_attn.testing import mismatch, relative_error

NAMES = ("dq", "dk", "dv")
Add = Callable[[Tensor, Tensor], Tensor]


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


WAYS: dict[str, Add] = {
    "bf16 sums": lambda total, part: _rounded(total + _rounded(part)),
    "bf16 partials": lambda total, part: total + _rounded(part),
    "float32": lambda total, part: total + part,
}


def replay(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, ring_size: int, add: Add) -> dict[str, Tensor]:
    """Gradients of the whole row as a ring of ``ring_size`` makes them, each hop's contribution added by ``add``."""
    kernel = KERNELS["reference"]
    batch, length, _, width = q.shape
    mask, params = Mask.of(CAUSAL, batch, length), Params(width**-0.5)
    whole = Layout(length, 1, 0).whole()
    out, lse = kernel.forward(q, k, v, tiles(mask, whole, whole), params)
    delta = torch.einsum("bthd,bthd->bht", dout.float(), out.float())

    totals = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for rank in range(ring_size):
        mine = Layout(length, ring_size, rank)
        here = mine.positions().to(q.device)
        for step in range(ring_size):
            source = (rank - step) % ring_size
            there = mine.positions(source).to(q.device)
            parts = (q[:, here], k[:, there], v[:, there])
            into = Gradients(*(kernel.new_gradient(x) for x in parts))  # type: ignore[arg-type]
            table = tiles(mask, mine.runs(), mine.runs(source))
            kernel.backward(dout[:, here], *parts, lse[:, :, here], delta[:, :, here], table, params, into)
            for total, index, part in zip(totals, (here, there, there), (into.dq, into.dk, into.dv), strict=True):
                total[:, index] = add(total[:, index], part)
    return {name: total.bfloat16() for name, total in zip(NAMES, totals, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 2), metavar=("QUERY", "KEY"))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rings", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save", type=Path, help="write the raw numbers here, as JSON")
    args = parser.parse_args()
    head = {**facts(), "device": args.device}

    generator = torch.Generator().manual_seed(0)
    shapes = [(1, args.length, heads, args.width) for heads in (*args.heads, args.heads[1], args.heads[0])]
    q, k, v, dout = (torch.randn(s, generator=generator).bfloat16().to(args.device) for s in shapes)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in wide), is_causal=True, enable_gqa=True
    )
    exact.transpose(1, 2).backward(dout.double())
    want = {name: x.grad for name, x in zip(NAMES, wide, strict=True)}
    single = replay(q, k, v, dout, 1, WAYS["float32"])

    rows = []
    print(f"{'ring':>4} {'way':<14} {'mismatch dq / dk / dv':<24} error dq / dk / dv")
    for ring_size in args.rings:
        for way, add in WAYS.items():
            got = replay(q, k, v, dout, ring_size, add)
            share = [mismatch(got[name], single[name]) for name in NAMES]
            error = [relative_error(got[name], want[name]) for name in NAMES]  # type: ignore[arg-type]
            rows.append({"ring_size": ring_size, "way": way, "mismatch": share, "error_against_float64": error})
            shares = " / ".join(f"{100 * x:.1f}" for x in share) + " %"
            print(f"{ring_size:>4} {way:<14} {shares:<24} {' / '.join(f'{x:.2e}' for x in error)}", flush=True)
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
