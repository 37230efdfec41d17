"""``python -m hf_ring_attn.run PROGRAM ARGUMENTS...``: runs a program with the plugin.

>>> python -m hf_ring_attn.run trl sft --num_processes 2 --attn_implementation ring_fp32 ...   # a console command
>>> torchrun --nproc-per-node 2 -m hf_ring_attn.run train.py --epochs 3                        # a script
>>> accelerate launch --config_file ring.yaml -m hf_ring_attn.run -m my_package.train          # a module
>>> torchrun --nproc-per-node 2 -m hf_ring_attn.run --attention ring_fp32 run_clm.py ...       # sets the attention, too

``--attention ring_fp32`` is for programs without an option for it: models get it if neither the program nor the model's
config names an attn_implementation.

PROGRAM sees the same as if python had started it: sys.argv, sys.path[0], and for a script or a module
``__name__ == "__main__"``. Processes that it launches (accelerate, trl, torchrun) get the plugin too.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from . import errors
from .integration.context.introspect import NAME
from .integration.hosts import launchers
from .integration.model.default_attention import use_by_default

ATTENTION = "--attention"


def run(arguments: Sequence[str]) -> None:
    """Runs the program named first in ``arguments``, with the rest as its arguments.

    "-m NAME" is a module, as for python. A name with a folder or a Python suffix is a script (or a folder or archive
    with a ``__main__.py``); any other name is a console command of an installed package, else a script, else a module.
    Before it may stand "--attention ring_fp32", which launchers pass on to their programs.

    Raises:
        NothingToRun: no program is named.
        OtherAttention: "--attention" names another one than ours.
        NoSuchProgram: it is none of these.
        Any error of the program; a console command always ends with SystemExit.
    """
    options, arguments = _options(arguments)
    if not arguments or arguments == ["-m"]:
        raise errors.NothingToRun()
    if options:
        use_by_default(NAME)
    launchers.carry_plugin(run, options)
    program, *rest = arguments
    if program == "-m":
        _run_module(rest[0], rest[1:])
    elif _is_path(program):
        _run_script(program, rest)
    elif command := _command(program):
        _run_command(command, rest)
    elif Path(program).is_file():
        _run_script(program, rest)
    else:
        _run_module(program, rest)


def _options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into our options and the program's part."""
    first, *rest = arguments or [""]
    flag, equals, name = first.partition("=")
    if flag != ATTENTION:
        return [], list(arguments)
    if not equals:
        name, *rest = rest or [""]
    if name != NAME:
        raise errors.OtherAttention(name)
    return [ATTENTION, NAME], rest


def _is_path(program: str) -> bool:
    return program.endswith((".py", ".pyc", ".pyz", ".zip")) or bool({os.sep, os.altsep or os.sep} & set(program))


def _command(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group="console_scripts", name=name)), None)


def _run_script(path: str, arguments: list[str]) -> None:
    if not Path(path).is_file() and not Path(path, "__main__.py").is_file():
        raise errors.NoSuchProgram(path, f"there is no such file (looked in {Path.cwd()})")
    sys.argv = [path, *arguments]
    _look_first_in(Path(path).resolve().parent)  # runpy does it for a folder or an archive
    runpy.run_path(path, run_name="__main__")


def _run_module(name: str, arguments: list[str]) -> None:
    spec = _spec(name)
    if spec is None:
        raise errors.NoSuchProgram(name, "it is no file, no console command and no module that python finds")
    if spec.submodule_search_locations is not None and _spec(f"{name}.__main__") is None:
        raise errors.NoSuchProgram(name, "the package has no __main__, so python cannot run it")
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_command(command: EntryPoint, arguments: list[str]) -> None:
    path = shutil.which(command.name) or command.name
    sys.argv = [path, *arguments]
    _look_first_in(Path(path).parent)
    sys.exit(command.load()())


def _spec(module: str) -> ModuleSpec | None:
    """Finds a module's spec without importing it; its parent packages are imported, as by ``python -m``."""
    if module.startswith("."):
        return None
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return None
        raise  # a parent package exists, but fails to import


def _look_first_in(folder: Path) -> None:
    """Puts ``folder`` at the head of sys.path, as python does, in place of ``python -m``'s working folder."""
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)


def main(arguments: Sequence[str]) -> int:
    """Calls `run` for a command line: prints refusals without a traceback, and returns the exit code."""
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(__doc__ or "")
        return 0
    try:
        run(arguments)
    except errors.BadCommand as error:
        sys.stderr.write(f"hf_ring_attn.run: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
