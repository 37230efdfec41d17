"""Speed of score_mod on one device: kernels and functions take turns, beside triton without a function.

    python recipes/benchmarks/score_mod.py [--kernels triton flex] [--tokens 8192 32768] [--rounds 5] [--save FOLDER]

Causal, bf16; a backward holds all that its kernel does, such as flex's second forward.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_ring_attn.attention.kernel_choice import part_of
from hf_ring_attn.bench import results
from hf_ring_attn.bench.clock import Timed, in_turns
from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.biases import Alibi, RelativeBias
from hf_ring_attn.kernels import KERNELS, Params, Request, ScoreMod, asking, choose
from hf_ring_attn.kernels.base import Gradients
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask, tiles


def passes(name: str, function: Any, tokens: int, heads: tuple[int, int], width: int, device: str) -> dict[str, Timed]:
    """The forward and the backward of one kernel with one function, which it must be able to serve."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, tokens, count, width, generator=generator, device=device).bfloat16()
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    mask, runs = Mask.of(CAUSAL, 1, tokens), Layout(tokens, 1, 0).whole()
    table = tiles(mask, runs, runs)
    kernel, mod, extra = KERNELS[name], None, {}
    if function is not None:
        mod = ScoreMod.of(function.to(device), q.device)
        request = Request(device, q.dtype, *heads, width, width, False, False, False, score_mod=True)
        assert choose(name, asking(request, mod, width**-0.5, None, partial(part_of, mask, 1, tokens))) is kernel
        mod = mod.with_values(mod.captured, [x.requires_grad for x in mod.captured])
        extra = mod.new_gradients()
    params = Params(width**-0.5, score_mod=mod)
    out, lse = kernel.forward(q, k, v, table, params)
    delta = kernel.delta(dout, out)
    dq, dk, dv = (kernel.new_gradient(x) for x in (q, k, v))
    into = Gradients(dq, dk, dv, extra=extra)
    return {
        "forward": Timed(lambda: kernel.forward(q, k, v, table, params)),
        "backward": Timed(lambda: kernel.backward(dout, q, k, v, lse, delta, table, params, into, out)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["triton", "flex"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("QUERY", "KEY"))
    parser.add_argument("--width", type=int, default=128, help="of a head")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    args = parser.parse_args()
    head, rows, heads = facts(), [], (args.heads[0], args.heads[1])
    functions = {
        "none": None, "fixed ALiBi slopes": Alibi(heads[0]), "learned ALiBi slopes": Alibi(heads[0], learnable=True),
        "T5's bias": RelativeBias(heads[0]),
    }  # fmt: skip
    for tokens in args.tokens:
        for of, function in functions.items():
            kernels = [name for name in args.kernels if function is not None or name != "flex"]
            calls = {
                f"{name}, {what}": call for name in kernels
                for what, call in passes(name, function, tokens, heads, args.width, args.device).items()
            }  # fmt: skip
            for call, found in in_turns(calls, args.rounds, torch.device(args.device), float).items():
                rows.append({"tokens": tokens, "function": of, "call": call, **found._asdict()})
                ms, peak = 1e3 * statistics.median(found.seconds), found.peak_bytes / 2**30
                print(f"{tokens:>8,} {of:22s} {call:22s} {ms:10.2f} ms {peak:6.2f} GiB", flush=True)
    if args.save:
        results.save(args.save, "score_mod", {**head, "heads": list(heads), "width": args.width}, rows)


if __name__ == "__main__":
    main()
