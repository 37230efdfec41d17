"""Blockwise attention on one device and inside a ring, at the sizes where ring-flash-attention's issue 24 went wrong.

    python recipes/benchmarks/blockwise.py [--save FOLDER]

B 1, S 3816 (eight ranks of 477), H 5, D 128, bf16, causal, signed random data. The table: largest and mean difference
of out, lse, dq, dk and dv from attention in float64 that is given the same bf16 inputs, for

- one call of the reference kernel;
- this package's ring of 8, replayed in one process (its zigzag pads the row to 3824);
- one device in chunks that divide 477;
- a ring of 8 with such chunks inside each step, as in the issue;
- the same with the likely fault: the gradients of a step are added, ``+=``, into buffers that the caller hands over
  again in the next step without clearing them.

Gradients are compared as they leave, in bf16, and those of one head once more before that rounding (relative error,
float64 given the same rounded out). Then the memory: bytes of tensors that are alive at once, forward and backward, by
length and chunk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_ring_attn.bench import results
from hf_ring_attn.bench.provenance import REPOSITORY, facts

sys.path.insert(0, str(REPOSITORY))  # the ring on one device and the fault are those of the tests

from hf_ring_attn.bench.replay import Answer, replay
from hf_ring_attn.kernels import Params
from hf_ring_attn.kernels.reference import Reference
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from hf_ring_attn.testing import Case, Inputs, relative_error
from tests.helpers.blockwise_chunks import Reusing, blockwise
from tests.helpers.live_bytes import peak_bytes
from tests.helpers.oracle import gradient_oracle, oracle

LENGTH, HEADS, WIDTH = 3816, 5, 128
SIZE, CHUNKS = 8, (477, 159, 53)
PARAMS = Params(WIDTH**-0.5)
NAMES = ("out", "lse", "dq", "dk", "dv")
Rows = list[dict[str, Any]]


def row() -> list[Tensor]:
    """q, k, v and dout [1, S, H, D] in bf16."""
    generator = torch.Generator().manual_seed(24)
    return [torch.randn(1, LENGTH, HEADS, WIDTH, generator=generator).bfloat16() for _ in range(4)]


def of_each_head(
    function: Callable[..., dict[str, Tensor]], x: list[Tensor], *more: Tensor, heads: int = HEADS
) -> dict[str, Tensor]:
    """The oracle of the first heads, one after the other: five dense matrices of scores in float64 are much memory."""
    answers = []
    for head in range(heads):
        q, k, v, dout, *rest = (tensor[:, :, head : head + 1] for tensor in (*x, *more))
        case = Case(why="one head", length=LENGTH, heads=1, kv_heads=1, head_dim=WIDTH, value_dim=WIDTH)
        answers.append(function(case, Inputs(q=q, k=k, v=v, dout=dout, sinks=None, documents=None), *rest))
    return {name: torch.cat([a[name] for a in answers], 1 if name == "lse" else 2) for name in answers[0]}


def ring(x: list[Tensor]) -> Answer:
    """The package's ring of 8, replayed; what pads the row sees nothing and is seen by none."""
    padded = -(-LENGTH // (2 * SIZE)) * 2 * SIZE
    more = [torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, padded - LENGTH)) for tensor in x]
    documents = torch.zeros(1, padded, dtype=torch.int64)
    documents[:, LENGTH:] = -1
    q, k, v, dout = more
    got = replay(Reference(), q, k, v, dout, Mask.of(CAUSAL, 1, padded, documents), SIZE, PARAMS, torch.float32)
    parts = got._asdict().items()
    return Answer(**{name: x[:, :, :LENGTH] if name == "lse" else x[:, :LENGTH] for name, x in parts})


def ways(mask: Mask) -> dict[str, Callable[[list[Tensor]], Answer]]:
    def chunked(make: Callable[[], Reference], chunk: int, size: int) -> Callable[[list[Tensor]], Answer]:
        def compute(x: list[Tensor]) -> Answer:
            q, k, v, dout = x
            return blockwise(make, q, k, v, dout, mask, chunk, PARAMS, size, torch.float32)

        return compute

    return {
        "one call": chunked(Reference, LENGTH, 1),
        f"ring of {SIZE}": ring,
        **{f"one device, chunks of {chunk}": chunked(Reference, chunk, 1) for chunk in CHUNKS},
        f"ring of {SIZE}, chunks of {CHUNKS[1]}": chunked(Reference, CHUNKS[1], SIZE),
        f"the fault: ring of {SIZE}, chunks of {CHUNKS[1]}": chunked(Reusing, CHUNKS[1], SIZE),
    }


def measure_errors() -> tuple[dict[str, Any], Rows]:
    x = row()
    exact = of_each_head(oracle, x)
    print(f"{'largest / mean difference from float64':<38}" + "".join(f"{name:>22}" for name in NAMES))
    table, first = [], None
    for way, compute in ways(Mask.of(CAUSAL, 1, LENGTH)).items():
        got = compute(x)._asdict()
        formula = of_each_head(gradient_oracle, x, got["out"], heads=1)
        unrounded = {name: relative_error(got[name][:, :, :1], formula[name]) for name in formula}
        line: dict[str, Any] = {"way": way, "before_rounding": unrounded}
        leaving = {name: got[name] if name == "lse" else got[name].bfloat16() for name in NAMES}
        first = leaving if first is None else first
        for name in NAMES:
            difference, apart = ((leaving[name].double() - other[name].double()).abs() for other in (exact, first))
            line[name] = {"max": difference.max().item(), "mean": difference.mean().item()}
            line[name]["max_from_one_call"] = apart.max().item()
        table.append(line)
        cells = (f"{line[name]['max']:.2e} / {line[name]['mean']:.2e}" for name in NAMES)
        print(f"{way:<38}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
        print(f"{'  before rounding, relative, one head':<82}" + "".join(f"{e:>22.1e}" for e in unrounded.values()))
    shape = {"batch": 1, "length": LENGTH, "heads": HEADS, "width": WIDTH, "dtype": "bfloat16", "causal": True}
    largest = {name: exact[name].abs().max().item() for name in NAMES}
    return {**shape, "largest_value": largest}, table


def measure_memory() -> tuple[dict[str, Any], Rows]:
    """One device in chunks, forward and backward, beyond the inputs; gradients in float32 and of a step included."""
    rows = []
    for length in (LENGTH // 2, LENGTH):
        for chunk in (*reversed(CHUNKS), 2 * 477):
            q, k, v, dout = (torch.randn(1, length, HEADS, WIDTH).bfloat16() for _ in range(4))
            mask = Mask.of(CAUSAL, 1, length)
            peak = peak_bytes(lambda: blockwise(Reference, q, k, v, dout, mask, chunk, PARAMS))  # noqa: B023  called at once
            rows.append({"length": length, "chunk": chunk, "peak_bytes": peak})
            text = f"{length:>6} tokens in chunks of {chunk:>4}: {peak / 2**20:7.1f} MiB"
            print(f"{text}; all scores once in float32: {HEADS * 4 * length**2 / 2**20:.0f} MiB", flush=True)
    return {"heads": HEADS, "width": WIDTH, "dtype": "bfloat16"}, rows


PARTS = {"errors": measure_errors, "memory": measure_memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {sorted(unknown)}, only {list(PARTS)}")
    for part in args.parts or PARTS:
        head = facts()
        shape, rows = PARTS[part]()
        if args.save:
            results.save(args.save, part, {**head, **shape}, rows)


if __name__ == "__main__":
    main()
