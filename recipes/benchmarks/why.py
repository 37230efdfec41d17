"""The table of why: what a ring's gradients lose when partial sums are rounded, by ring size, replayed in one process.

    python recipes/benchmarks/why.py [--length 4096] [--device cpu] [--save FOLDER]

bf16 inputs, causal, grouped queries, one forward pass; then the backward of every rank of a ring of W with three ways
of adding the contributions of its hops:

- "bf16 sums": each contribution is rounded to bf16 and added in bf16 (TransformerEngine's p2p, as released);
- "bf16 partials": each contribution is rounded to bf16 and added in float32 (ring-flash-attention, torch's ring);
- "float32": contributions are added in float32 and rounded once, at home (this package).

`hf-ring-attn bench --errors` measures more: other kernels, fp16, rings that merge partial forwards, a launched ring.

"mismatch" is the share of elements outside rtol 1.3e-6 / atol 1e-5 of the same kernel on one device, the measure of
TransformerEngine PR 821. "error" is relative to float64 (norm of the difference over norm).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from hf_ring_attn.bench import results
from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.bench.replay import replay
from hf_ring_attn.bench.rounding import Way, rounded
from hf_ring_attn.kernels import KERNELS, Params
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from hf_ring_attn.testing import mismatch, relative_error

NAMES = ("dq", "dk", "dv")
WAYS: dict[str, Way | None] = {"bf16 sums": "16-bit sums", "bf16 partials": "rounded parts", "float32": None}


def gradients(inputs: list[Tensor], ring_size: int, way: Way | None) -> dict[str, Tensor]:
    """Of the whole row, as a ring of ``ring_size`` makes them."""
    q, k, v, dout = inputs
    kernel, params = KERNELS["reference"], Params(q.shape[3] ** -0.5)
    if way is None:
        answer = replay(kernel, q, k, v, dout, Mask.of(CAUSAL, 1, q.shape[1]), ring_size, params)
    else:
        answer = rounded(kernel, q, k, v, dout, ring_size, params, way, merged=False)
    return {name: getattr(answer, name) for name in NAMES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 2), metavar=("QUERY", "KEY"))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rings", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    args = parser.parse_args()
    head = {**facts(), "device": args.device}

    generator = torch.Generator().manual_seed(0)
    shapes = [(1, args.length, heads, args.width) for heads in (*args.heads, args.heads[1], args.heads[0])]
    inputs = [torch.randn(s, generator=generator).bfloat16().to(args.device) for s in shapes]
    want = gradients([x.double() for x in inputs], 1, None)
    single = gradients(inputs, 1, None)

    rows = []
    print(f"{'ring':>4} {'way':<14} {'mismatch dq / dk / dv':<24} error dq / dk / dv")
    for ring_size in args.rings:
        for way, of_ours in WAYS.items():
            got = gradients(inputs, ring_size, of_ours)
            share = [mismatch(got[name], single[name]) for name in NAMES]
            error = [relative_error(got[name], want[name]) for name in NAMES]
            rows.append({"ring_size": ring_size, "way": way, "mismatch": share, "error_against_float64": error})
            shares = " / ".join(f"{100 * x:.1f}" for x in share) + " %"
            print(f"{ring_size:>4} {way:<14} {shares:<24} {' / '.join(f'{x:.2e}' for x in error)}", flush=True)
    if args.save:
        results.save(args.save, "why", head, rows)


if __name__ == "__main__":
    main()
