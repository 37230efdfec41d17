"""The command ``autoload``: its arguments and what it prints."""

from __future__ import annotations

import argparse
import sys

from ..config import torch_autoloads
from . import switch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--enable", action="store_true", help="register it for every program of this Python environment")
    what.add_argument("--disable", action="store_true", help="undo --enable")
    what.add_argument("--status", action="store_true", help="show if it is enabled (default)")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Turns it on or off if asked to, and prints the state.

    Raises:
        NotInstalled, NotWritable: there is nothing to change, or no right to.
    """
    place = switch.find()
    if given.enable:
        switch.enable(place)
    elif given.disable:
        switch.disable(place)
    sys.stdout.write(state(place) + "\n")
    return 0


def state(place: switch.Place) -> str:
    """A line on what torch will do at its next import."""
    if not switch.is_on(place):
        return f"autoload: off ({place.site})"
    text = f"autoload: on ({place.module})"
    if not switch.is_current(place):
        text += "; it is of another version: --enable renews it"
    if not torch_autoloads():
        text += "; but TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off in this environment"
    return text
