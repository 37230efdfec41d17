"""The command ``bench``: its arguments, its ranks, its table and its file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import RingAttentionError
from . import contenders, errors, plot, profile, results, speed
from .peers import PEERS
from .provenance import facts
from .workload import Workload
from .world import world

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("workload")
    what.add_argument("--tokens", type=int, nargs="+", default=[32768], help="row length; several for several rows")
    what.add_argument("--heads", type=int, default=32, help="query heads (default: those of Llama 3 8B)")
    what.add_argument("--kv-heads", type=int, default=8)
    what.add_argument("--head-dim", type=int, default=128, help="width of queries and keys")
    what.add_argument("--value-dim", type=int, help="width of values, if different")
    what.add_argument("--dtype", choices=DTYPES, help="default: bfloat16; with --errors: bfloat16 and float16")
    what.add_argument("--window", type=int, help="keys that a query sees")
    what.add_argument("--document", type=int, help="tokens of each packed document")
    what.add_argument("--deterministic", action="store_true")
    how = parser.add_argument_group("how")
    how.add_argument("--device", help='"cuda" or "cpu"; default: a GPU if there is one')
    how.add_argument("--kernel", default="auto", help="as in RingConfig")
    how.add_argument("--backward", nargs="+", choices=("ring", "gather"), default=["ring"])
    how.add_argument("--traffic", nargs="+", choices=("auto", "messages", "pulls"), default=["auto"])
    how.add_argument("--heads-per-gather", type=int, nargs="+", default=[0], help="0: chosen by size")
    how.add_argument("--ring", type=int, default=8, help="in one process: size of the simulated ring")
    how.add_argument("--against", nargs="+", choices=PEERS, default=[], help="under torchrun: other packages")
    how.add_argument(
        "--errors", nargs="*", choices=errors.PARTS, metavar="PART",
        help="errors in place of speed, against one device and float64 (rings); PR 821's case (pr821); default: both. "
        "More ranks than GPUs may share them",
    )  # fmt: skip
    how.add_argument("--rings", type=int, nargs="+", default=errors.SIZES, help="of --errors: simulated sizes")
    how.add_argument("--rounds", type=int, default=5)
    how.add_argument("--profile", action="store_true", help="also save where the time goes (needs --save)")
    how.add_argument("--plot", type=Path, nargs="+", metavar="FILE", help="measure nothing; draw these results.jsonl")
    how.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")


def run(given: argparse.Namespace) -> int:
    if given.plot:
        return _plot(given.plot)
    with world(given.device, may_share=given.errors is not None) as (ring, device):
        first = ring.rank == 0
        if given.against and ring.size == 1:
            sys.stderr.write("--against compares rings of several ranks: start this with torchrun\n")
            return 2
        chosen = contenders.options(given.backward, given.traffic, given.heads_per_gather)
        if given.errors is not None:
            works = [_work(given, n, device, dtype) for n in given.tokens for dtype in _dtypes(given)]
            if given.window or given.document:
                sys.stderr.write("--errors is for one causal document: leave out --window and --document\n")
                return 2
            parts = given.errors or errors.PARTS
            return errors.run(works, ring, parts, given.rings, given.kernel, chosen, given.save)
        head = {**facts(), "ranks": ring.size, "rounds": given.rounds}
        if first:
            sys.stdout.write(speed.HEAD + "\n")
        rows: list[dict[str, Any]] = []
        for tokens in given.tokens:
            work = _work(given, tokens, device, _dtypes(given)[0])
            found = speed.measure(
                work, ring, chosen, ring_size=given.ring, kernel=given.kernel, against=given.against,
                rounds=given.rounds, largest=speed.largest_over(ring, device),
            )  # fmt: skip
            rows += found
            if first:
                sys.stdout.write("\n".join(speed.table(found)) + "\n")
                sys.stdout.flush()
            if first and given.save:  # after each row, so that an interrupted job leaves its results
                results.save(given.save, "speed", head, rows)
            if given.profile and given.save:
                profile.save(work, ring, given.kernel, chosen, given.save)
    return 0


def _plot(files: Sequence[Path]) -> int:
    try:
        written = plot.save(files)
    except RingAttentionError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


def _dtypes(given: argparse.Namespace) -> list[torch.dtype]:
    return [DTYPES[given.dtype]] if given.dtype else [torch.bfloat16, torch.float16]


def _work(given: argparse.Namespace, tokens: int, device: torch.device, dtype: torch.dtype) -> Workload:
    return Workload(
        tokens, device, given.heads, given.kv_heads, given.head_dim, given.value_dim or given.head_dim, dtype,
        given.window, given.document, given.deterministic,
    )  # fmt: skip
