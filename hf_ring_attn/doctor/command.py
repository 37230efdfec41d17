"""The command ``doctor``: its arguments, its report, and the live check of ``--ranks``."""

from __future__ import annotations

import argparse
import sys

import torch

from ..command_line import DTYPES, add_shape, check_shape, count
from ..command_ranks import ranks_per_gpu, start_ranks, world
from ..config import is_a_launched_rank
from ..kernels import Request
from . import live
from .report import report

LIVE_SECONDS = 180.0
FLAGS = {
    "softcap": "capped scores, as in Gemma 2",
    "sinks": "attention sinks, as in gpt-oss",
    "deterministic": "the same bits in every run",
    "holes": "masks with gaps: padding, image blocks",
}
"""Demands on a kernel, by option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="dtype of the attention (default: bfloat16)"
    )
    for flag, what in FLAGS.items():
        parser.add_argument(f"--{flag}", action="store_true", help=f"require {what}")
    parser.add_argument(
        "--ranks", type=count(), metavar="N",
        help="also start N ranks, and compare a small attention in a ring with one process",
    )  # fmt: skip
    parser.set_defaults(run=run, check=check_shape)


def run(given: argparse.Namespace) -> int:
    """Returns 0 if some kernel can serve and the live ring, if asked for, is right; else 1."""
    if given.ranks and is_a_launched_rank():
        return _live(given)
    text, able = report(_request(given))
    sys.stdout.write(text + "\n")
    if not given.ranks:
        return 0 if able else 1
    sys.stdout.write("\n")
    sys.stdout.flush()
    if given.ranks == 1:
        code = _live(given)
    else:
        code = start_ranks(given.ranks, given.argv, LIVE_SECONDS)
    if code < 0:
        sys.stdout.write(f"live check: FAILED: a rank was ended after {LIVE_SECONDS:.0f} s, or by a signal\n")
    return 0 if able and code == 0 else 1


def _request(given: argparse.Namespace) -> Request:
    return Request(
        given.device or ("cuda" if torch.cuda.is_available() else "cpu"), DTYPES[given.dtype], given.heads,
        given.kv_heads, given.head_dim, given.value_dim or given.head_dim, given.softcap, given.sinks,
        given.deterministic, given.holes,
    )  # fmt: skip


def _live(given: argparse.Namespace) -> int:
    """Runs the live check on this rank; the first rank prints. Returns 0 if all is right, else 1."""
    with world(given.device, may_share=True) as (ring, device):
        shared = device.type == "cuda" and ranks_per_gpu() > 1
        backend = "gloo" if device.type == "cpu" else "P2P copies" if shared else "NCCL"
        found = []
        _say(ring.rank, f"live check: {ring.size} ranks on {device.type} ({backend}), {given.dtype}, against float64:")
        for line, right in live.check(_request(given), ring, device, shared):
            _say(ring.rank, line)
            found.append(right)
        able = bool(found) and all(found)
        _say(ring.rank, f"live check: {'passed' if able else 'FAILED'}")
    return 0 if able else 1


def _say(rank: int, text: str) -> None:
    if rank == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
