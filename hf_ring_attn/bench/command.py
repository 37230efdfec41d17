"""The command ``bench``: its arguments, its ranks, its table and its file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

import torch

from ..command_line import DTYPES, add_shape, check_shape, count
from ..command_ranks import world
from ..config import KERNEL_NAMES, Backward, Traffic
from . import contenders, errors, plot, results, speed
from .peers import PEERS
from .provenance import facts
from .workload import Workload

TOKENS = {"cuda": 32768, "cpu": 512}
"""The row, by kind of device, if the user names none: half a minute on a slow CPU."""
RING = 8
"""The size of the simulated ring, if the user names none."""


def check(given: argparse.Namespace) -> str | None:
    """Returns what is wrong with the arguments of ``bench``, or None."""
    if given.errors is not None and (given.window or given.document):
        return "--errors is for one causal document: leave out --window and --document"
    if given.errors is not None and given.ring is not None:
        return "--errors measures several rings: give --rings, not --ring"
    if given.errors is None and given.rings is not None:
        return "--rings is for --errors; times are of one ring: give --ring"
    return check_shape(given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is computed")
    rows = f"length of the row, or several: 131072, 128K (default: {TOKENS['cuda']}, on a CPU {TOKENS['cpu']})"
    what.add_argument("--tokens", type=count(), nargs="+", help=rows)
    add_shape(what)
    what.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the attention (default: bfloat16; with --errors: bfloat16 and float16)",
    )
    what.add_argument("--window", type=count(), help="number of keys that a query attends to")
    what.add_argument("--document", type=count(), help="length of each packed document")
    what.add_argument("--deterministic", action="store_true", help="require the same bits in every run")
    how = parser.add_argument_group("how")
    how.add_argument("--kernel", choices=("auto", *KERNEL_NAMES), default="auto", help="RingConfig(kernel=...)")
    how.add_argument(
        "--backward", nargs="+", choices=get_args(Backward), default=["ring"],
        help="RingConfig(backward=...), one or both (default: ring)",
    )  # fmt: skip
    how.add_argument(
        "--traffic", nargs="+", choices=get_args(Traffic), default=["auto"],
        help="RingConfig(traffic=...), one or several (default: auto)",
    )  # fmt: skip
    how.add_argument(
        "--heads-per-gather", type=count(0), nargs="+", default=[0],
        help="RingConfig(heads_per_gather=...), one or several (default: 0, chosen by size as by None)",
    )  # fmt: skip
    how.add_argument("--ring", type=count(), help="size of the simulated ring in one process (default: 8)")
    how.add_argument(
        "--against", nargs="+", choices=PEERS, default=[], help="also measure these packages (under torchrun)"
    )
    how.add_argument(
        "--errors", nargs="*", choices=errors.PARTS, metavar="PART",
        help="measure errors instead of time. rings: of rings and of one device, from float64; pr821: of the test in "
        "TransformerEngine's PR 821 (default: both)",
    )  # fmt: skip
    how.add_argument(
        "--rings", type=count(), nargs="+", help="sizes of the simulated rings of --errors (default: 1 to 64)"
    )
    how.add_argument("--rounds", type=count(), default=5, help="number of measured rounds (default: 5)")
    how.add_argument(
        "--plot",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: draw these results.jsonl as .svg files beside them",
    )
    how.add_argument("--save", type=Path, metavar="FOLDER", help="save the raw numbers as FOLDER/results.jsonl")
    parser.set_defaults(run=run, check=check)


def run(given: argparse.Namespace) -> int:
    if given.plot:
        sys.stdout.write("".join(f"{path}\n" for path in plot.save(given.plot)))
        return 0
    with world(given.device, may_share=given.errors is not None) as (ring, device):
        first = ring.rank == 0
        if given.against and ring.size == 1:
            sys.stderr.write("--against compares rings of several ranks: start this with torchrun\n")
            return 2
        if first and given.save:
            results.earlier(given.save)
        chosen = contenders.options(given.backward, given.traffic, given.heads_per_gather)
        lengths = given.tokens or [TOKENS[device.type]]
        if given.errors is not None:
            works = [_work(given, n, device, dtype) for n in lengths for dtype in _dtypes(given)]
            parts = given.errors or errors.PARTS
            return errors.run(works, ring, parts, given.rings or errors.SIZES, given.kernel, chosen, given.save)
        head = {**facts(), "ranks": ring.size, "rounds": given.rounds}
        works = [_work(given, tokens, device, _dtypes(given)[0]) for tokens in lengths]
        ring_size = given.ring or RING
        if first:
            coming = speed.announced(works, ring, chosen, ring_size, given.against, given.rounds)
            sys.stdout.write(f"{coming}\n{speed.HEAD}\n")
            sys.stdout.flush()
        rows: list[dict[str, Any]] = []
        for work in works:
            found = speed.measure(
                work, ring, chosen, ring_size=ring_size, kernel=given.kernel, against=given.against,
                rounds=given.rounds, largest=speed.largest_over(ring, device),
            )  # fmt: skip
            rows += found
            if first:
                sys.stdout.write("\n".join(speed.table(found)) + "\n")
                sys.stdout.flush()
            if first and given.save:  # after each row, so that an interrupted job leaves its results
                results.save(given.save, "speed", head, rows)
    return 0


def _dtypes(given: argparse.Namespace) -> list[torch.dtype]:
    return [DTYPES[given.dtype]] if given.dtype else [torch.bfloat16, torch.float16]


def _work(given: argparse.Namespace, tokens: int, device: torch.device, dtype: torch.dtype) -> Workload:
    return Workload(
        tokens, device, given.heads, given.kv_heads, given.head_dim, given.value_dim or given.head_dim, dtype,
        given.window, given.document, given.deterministic,
    )  # fmt: skip
