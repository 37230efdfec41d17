"""``hf-ring-attn`` (also ``python -m hf_ring_attn``): commands for the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from . import doctor
from .bench import command as bench
from .bench.command import DTYPES
from .kernels import Request


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="hf-ring-attn", description="Ring attention with the single-GPU answer.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_doctor(commands.add_parser("doctor", help="show installed packages, and kernels for an attention"))
    about = "measure speed and memory of attention in a ring, against one device and other packages"
    bench.add_arguments(commands.add_parser("bench", help=about, description=about))
    given = parser.parse_args(arguments)
    run = {"doctor": _doctor, "bench": bench.run}[given.command]
    return run(given)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: those of Llama 3 8B)")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128, help="width of queries and keys")
    parser.add_argument("--value-dim", type=int, help="width of values, if different")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", help='"cuda" or "cpu"; default: a GPU if there is one')
    for flag in ("softcap", "sinks", "deterministic"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--holes", action="store_true", help="a document's keys in several runs: padding, image blocks")


def _doctor(given: argparse.Namespace) -> int:
    request = Request(
        given.device or ("cuda" if torch.cuda.is_available() else "cpu"), DTYPES[given.dtype], given.heads,
        given.kv_heads, given.head_dim, given.value_dim or given.head_dim, given.softcap, given.sinks,
        given.deterministic, given.holes,
    )  # fmt: skip
    text, able = doctor.report(request)
    sys.stdout.write(text + "\n")
    return 0 if able else 1
