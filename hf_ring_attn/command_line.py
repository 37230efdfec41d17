"""Readers of arguments that several commands share: counts, dtypes, a device, an attention's shape."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
UNITS = {"": 1, "K": 2**10, "M": 2**20}


def count(least: int = 1) -> Callable[[str], int]:
    """Reads a whole number from ``least`` on; 128K and 1M are 131072 and 1048576."""

    def read(text: str) -> int:
        parts = re.fullmatch(r"\+?([0-9]+)([KM]?)", text, re.IGNORECASE)
        number = int(parts[1]) * UNITS[parts[2].upper()] if parts else None
        if number is None or number < least:
            needed = f"which must be a whole number from {least} on (128K is 131072)"
            raise argparse.ArgumentTypeError(f"got {text}, {needed}")
        return number

    return read


def device(text: str) -> str:
    """Reads a kind of device that is here."""
    if text not in ("cuda", "cpu"):
        raise argparse.ArgumentTypeError(f"got {text}, which must be cuda or cpu")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("got cuda, but torch finds no GPU here")
    return text


def add_shape(parser: argparse._ActionsContainer) -> None:
    """Adds the shape of an attention and its device."""
    parser.add_argument(
        "--heads", type=count(), default=32, help="number of query heads (default: 32, as in Llama 3 8B)"
    )
    parser.add_argument("--kv-heads", type=count(), default=8, help="number of key/value heads (default: 8)")
    parser.add_argument("--head-dim", type=count(), default=128, help="width of queries and keys (default: 128)")
    parser.add_argument("--value-dim", type=count(), help="width of values (default: that of keys)")
    parser.add_argument("--device", type=device, help='"cuda" or "cpu"; default: a GPU if there is one')


def check_shape(given: argparse.Namespace) -> str | None:
    """Returns what is wrong with arguments that do not go together, or None."""
    if given.heads % given.kv_heads:
        return f"--heads {given.heads} must be a multiple of --kv-heads {given.kv_heads}"
    return None
