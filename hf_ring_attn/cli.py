"""``hf-ring-attn`` (also ``python -m hf_ring_attn``): commands for the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from . import doctor
from .bench import command as bench
from .bench.command import DTYPES, add_shape, check_shape
from .errors import RingAttentionError
from .kernels import Request
from .plan import command as plan
from .verify import command as verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 2 for what is refused, in words."""
    parser = argparse.ArgumentParser(prog="hf-ring-attn", description="Ring attention with the single-GPU answer.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_doctor(commands.add_parser("doctor", help="show installed packages, and kernels for an attention"))
    about = "measure speed and memory of attention in a ring, against one device and other packages"
    bench.add_arguments(commands.add_parser("bench", help=about, description=about))
    about = "forecast the memory and the seconds of a training step, from a model's config alone"
    plan.add_arguments(commands.add_parser("plan", help=about, description=about))
    about = "compare a model in a ring with itself on one device, and look for leaks"
    verify.add_arguments(commands.add_parser("verify", help=about, description=about))
    given = parser.parse_args(arguments)
    check, run = {
        "doctor": (check_shape, _doctor), "bench": (bench.check, bench.run), "plan": (plan.check, plan.run),
        "verify": (verify.check, verify.run),
    }[given.command]  # fmt: skip
    if problem := check(given):
        commands.choices[given.command].error(problem)
    try:
        return run(given)
    except RingAttentionError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    add_shape(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
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
