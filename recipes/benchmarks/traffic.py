"""How evenly a ring shares the work of a mask, and how many bytes it moves, against a gather of the whole row: where
every rank holds a zigzag's chunks, and where packed documents are balanced as `hf_ring_attn.sharding.balance` has it.

    python recipes/benchmarks/traffic.py [--length 131072] [--rings 2 4 8] [--save FOLDER]

Counted from the very plans that a ring runs by, without a GPU and without a ring: visible pairs of each rank's tiles,
and the tokens of each rank's messages. Packed rows are real: files of Python's standard library, a byte a token, put
into rows by best fit as TRL's packing does. Bytes are those that a rank receives in one layer's forward and backward,
for 8 key heads of width 128 in bfloat16 and gradients in float32; the mean and the largest over ranks. Of models whose
last layers attend to the keys and values of earlier ones: bytes of the whole stack's forward, if every layer gathers,
and if only those do that make them.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_ring_attn.bench import results
from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.bench.workload import tokens_received, visible_pairs
from hf_ring_attn.sharding.balance import balanced
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Band, Mask
from hf_ring_attn.sharding.plan import Plan

WIDTH = 8 * 2 * 128
"""Numbers that a token's key and value have together."""


@dataclass(frozen=True)
class Stack:
    """Layers whose last ones take the keys and values of earlier ones.

    Args:
        taking: how many take them; every: one layer in so many, the last of them, has no window.
        numbers: that a token's key and value have together, under the window and without it.
    """

    layers: int
    taking: int
    every: int
    window: int
    numbers: tuple[int, int]


STACKS = {
    "Gemma 3n E4B": Stack(35, 15, 5, 512, (2 * 2 * 256, 2 * 2 * 256)),
    "Gemma 4 E4B": Stack(42, 18, 6, 512, (2 * 2 * 256, 2 * 2 * 512)),
}


def packed_rows(length: int, longest: int | None = None) -> list[list[int]]:
    """Lengths of the files in each row of ``length``, best fit, longest first; files are cut at ``longest``."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    sizes = [min(path.stat().st_size, longest or length, length) for path in files if "site-packages" not in path.parts]
    rows: list[list[int]] = []
    for size in sorted((size for size in sizes if size), reverse=True):
        fits = [row for row in rows if sum(row) + size <= length]
        if fits:
            max(fits, key=sum).append(size)
        else:
            rows.append([size])
    return rows


def documents_of(sizes: list[int], length: int) -> Tensor:
    """[1, S] ids, -1 where the row is not filled."""
    ids = torch.full((1, length), -1)
    filled = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    ids[0, : len(filled)] = filled
    return ids


def counted(mask: Mask, zigzag: Layout, documents: Tensor | None) -> dict[str, Any]:
    """``documents``: those to balance; None for the zigzag."""
    length, ring = zigzag.length, zigzag.world_size
    work, received, sparse, tiles, seconds = [], [], False, [], []
    start = time.perf_counter()
    owners = () if documents is None else balanced(documents, zigzag).owners
    chosen = time.perf_counter() - start
    for rank in range(ring):
        layout = Layout(length, ring, rank, owners)
        here: Any = SimpleNamespace(name="", size=ring, rank=rank)
        start = time.perf_counter()
        plan = Plan.of(here, layout, mask)
        seconds.append(time.perf_counter() - start)
        tiles.append(len(plan.tiles[: plan.stops[0]]))
        tables = plan.tables
        work.append(visible_pairs(tables.forward))
        sparse = sparse or tables.exchange is not None
        keys, sums = tokens_received(tables, layout)
        received.append((keys * 2 * WIDTH, (keys * 2 + sums * 4) * WIDTH))
    others = (ring - 1) * (length // ring)
    full = others * 2 * WIDTH, others * (2 + 4) * WIDTH
    return {
        "ring": ring, "chunks": layout.chunks if owners else "zigzag", "sparse": sparse, "tiles": sum(tiles) / ring,
        "seconds_to_choose": chosen, "seconds_to_plan": sum(seconds) / ring, "work_by_rank": work,
        "largest_work_over_mean": max(work) * ring / sum(work),
        "bytes_received_forward": [forward for forward, _ in received],
        "bytes_received_backward": [backward for _, backward in received],
        "bytes_of_a_whole_gather_and_ring": full,
    }  # fmt: skip


def gathered(stack: Stack, length: int, ring: int) -> tuple[float, float]:
    """Bytes that a rank receives in a forward, the mean over ranks: by all layers, and by those that make keys."""
    kinds = Mask.of(Band(0, stack.window - 1), 1, length), Mask.of(CAUSAL, 1, length)
    each = []
    for mask, numbers in zip(kinds, stack.numbers, strict=True):
        received = counted(mask, Layout(length, ring, 0), None)["bytes_received_forward"]
        each.append(sum(received) / ring * numbers / WIDTH)
    layers = [each[number % stack.every == 0] for number in range(1, stack.layers + 1)]
    return sum(layers), sum(layers[: stack.layers - stack.taking])


Kinds = list[tuple[float, Mask, Tensor | None]]
"""Masks with the share of the layers, or of the rows, that have them, and the documents of packed rows."""


def masks(length: int) -> dict[str, Kinds]:
    """Masks by name."""

    def packed(rows: list[list[int]], band: Band) -> Kinds:
        documents = [documents_of(row, length) for row in rows]
        return [(1 / len(rows), Mask.of(band, 1, length, ids), ids) for ids in documents]

    causal, local = Mask.of(CAUSAL, 1, length), Mask.of(Band(0, 1023), 1, length)
    rows = packed_rows(length)
    short = packed_rows(length, 4096)
    return {
        "causal, one document": [(1, causal, None)],
        "Mistral's window of 4096": [(1, Mask.of(Band(0, 4095), 1, length), None)],
        "Gemma 3: five layers with a window of 1024, one without": [(5 / 6, local, None), (1 / 6, causal, None)],
        "packed files": packed(rows, CAUSAL),
        "packed files, cut at 4096": packed(short, CAUSAL),
        "packed files, Mistral's window": packed(rows, Band(0, 4095)),
    }


def entry(name: str, kinds: Kinds, zigzag: Layout, layout: str) -> dict[str, Any]:
    """A line of the table; the raw numbers are those of the worst row."""
    parts = [
        (share, counted(mask, zigzag, documents if layout == "balanced" else None)) for share, mask, documents in kinds
    ]

    def mean(key: str) -> float:
        return sum(float(share * part[key]) for share, part in parts)

    bytes_share = []
    for key, column in (("bytes_received_forward", 0), ("bytes_received_backward", 1)):
        moved = sum(share * sum(part[key]) / zigzag.world_size for share, part in parts)
        bytes_share.append(moved / parts[0][1]["bytes_of_a_whole_gather_and_ring"][column])
    worst = max((part for _, part in parts), key=lambda part: float(part["largest_work_over_mean"]))
    return {
        "mask": name, "ring": zigzag.world_size, "layout": layout, "masks": len(parts),
        "work_mean": mean("largest_work_over_mean"), "work_worst": worst["largest_work_over_mean"],
        "forward_bytes_share": bytes_share[0], "backward_bytes_share": bytes_share[1], "sparse": mean("sparse"),
        "tiles_of_a_forward": mean("tiles"), "chunks": dict(Counter(str(part["chunks"]) for _, part in parts)),
        "seconds_to_choose": mean("seconds_to_choose"), "seconds_to_plan": mean("seconds_to_plan"), "worst": worst,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['mask']:56s} ring {row['ring']} {row['layout']:8s}: {row['work_mean']:.3f} (worst row "
        f"{row['work_worst']:.3f}) | forward {row['forward_bytes_share']:6.1%}, backward "
        f"{row['backward_bytes_share']:6.1%} | {row['chunks']}, {row['tiles_of_a_forward']:.1f} tiles, "
        f"{row['sparse']:.0%} sparse, {row['seconds_to_choose'] * 1e3:.1f} + {row['seconds_to_plan'] * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--rings", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    args = parser.parse_args()
    head = facts()
    found = []
    print(f"{args.length} tokens            work: largest share over mean | bytes of a whole gather and ring | chunks")
    for name, kinds in masks(args.length).items():
        for ring in args.rings:
            for layout in ("zigzag", "balanced"):
                if layout == "zigzag" or any(documents is not None for _, _, documents in kinds):
                    found.append(entry(name, kinds, Layout(args.length, ring, 0), layout))
                    print(line(found[-1]))
    stacks = []
    for name, stack in STACKS.items():
        for ring in args.rings:
            every, once = gathered(stack, args.length, ring)
            stacks.append({"model": name, **asdict(stack), "ring": ring, "bytes_forward": every, "bytes_shared": once})
            print(
                f"{name}, forward, ring {ring}: a rank receives {every / 2**20:.1f} MiB if all {stack.layers} layers "
                f"gather, {once / 2**20:.1f} MiB ({once / every:.1%}) if only those do that make keys"
            )
    if args.save:
        results.save(args.save, "traffic", head, [*found, *stacks])


if __name__ == "__main__":
    main()
