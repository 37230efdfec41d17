"""Launchers that hf_ring_attn.run may start: accelerate's, which TRL's command uses, too, and torch's.

They start a new python per rank without the plugin. So they are patched to start hf_ring_attn.run with their program.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ... import errors
from ...config import is_a_launched_rank
from ..patching import changes
from ..patching.changes import Original, Patch, around

RUN = "hf_ring_attn.run"


def carry_plugin(run: Callable[[Sequence[str]], None], options: Sequence[str] = ()) -> None:
    """Makes launchers of this process start their programs through hf_ring_attn.run.

    In a launched process (``torchrun -m hf_ring_attn.run trl sft``), a command that would launch again, without options
    for that, runs its program in this process with ``run``.

    Args:
        run: runs a program in this process, given its command line.
        options: options of hf_ring_attn.run for the launched programs.
    """

    @around
    def launch_command(original: Original, args: Any) -> None:
        if is_a_launched_rank():
            _refuse_options(args)
            run(_program(args))
        else:
            original(_through_us(args, options))

    @around
    def run_torch(original: Original, args: Any) -> None:
        original(_through_us(args, options))

    patches = (
        Patch("accelerate.commands.launch:launch_command", "(args)", launch_command),
        Patch("torch.distributed.run:run", "(args)", run_torch),
    )
    for patch in patches:
        importlib.import_module(patch.module)
    changes.install(patches)


def _program(args: Any) -> list[str]:
    return [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]


def _through_us(args: Any, options: Sequence[str]) -> Any:
    """Changes a launcher's parsed command line so that hf_ring_attn.run runs its program."""
    if args.no_python:
        raise errors.NoPython(args.training_script)
    if not (args.module and args.training_script == RUN):
        args.training_script_args = [*options, *_program(args)]
        args.training_script, args.module = RUN, True
    return args


def _refuse_options(args: Any) -> None:
    parser = sys.modules["accelerate.commands.launch"].launch_command_parser()
    defaults = vars(parser.parse_args([args.training_script]))
    about_the_program = {"training_script", "training_script_args", "module", "nondefault"}
    given = sorted(name for name in defaults.keys() - about_the_program if getattr(args, name) != defaults[name])
    if given:
        raise errors.LaunchedTwice(args.training_script, given)
