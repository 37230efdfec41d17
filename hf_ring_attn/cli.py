"""``hf-ring-attn`` (also ``python -m hf_ring_attn``): commands for the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .autoload import command as autoload
from .bench import command as bench
from .doctor import command as doctor
from .errors import RingAttentionError
from .plan import command as plan
from .verify import command as verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 2 for what is refused, in words.

    A command sets ``run`` and, if arguments may not go together, ``check``; it gets its own command line as ``argv``.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="hf-ring-attn", description="Ring attention with the single-GPU answer.")
    parser.add_argument("--version", action="version", version=f"hf-ring-attn {__version__}")
    commands = parser.add_subparsers(dest="command")
    about = "show installed packages and GPUs, and which kernels can run; with --ranks, test a ring"
    doctor.add_arguments(commands.add_parser("doctor", help=about, description=about))
    about = "forecast memory and seconds of a training step from the model's config"
    plan.add_arguments(commands.add_parser("plan", help=about, description=about))
    about = "compare a model in a ring with the same model on one device, and test that documents stay separate"
    verify.add_arguments(commands.add_parser("verify", help=about, description=about))
    about = "measure time and memory of attention in a ring, on one device, and in other packages"
    bench.add_arguments(commands.add_parser("bench", help=about, description=about))
    about = 'register "ring_fp32" in programs that do not import the package'
    autoload.add_arguments(commands.add_parser("autoload", help=about, description=about))
    parser.set_defaults(check=lambda _given: None)
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help(sys.stderr)
        return 2
    given.argv = arguments
    if problem := given.check(given):
        commands.choices[given.command].error(problem)
    try:
        return int(given.run(given))
    except RingAttentionError as error:
        sys.stderr.write(f"{error}\n")
        return 2
