"""Programs of one or more processes, as torchrun or accelerate launch start them, without the cost of their imports.

A launched process spends five seconds on importing torch and transformers, a launcher another two. Here processes are
forked from one that has done so. What a launcher tells its processes they are told as well: torchrun's variables, and
those that accelerate makes of a launch config, by its own code. Launchers themselves are started in
tests/integration/test_launch_configs.py and test_command_lines.py, and by CI's main job.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from tests.helpers.live_ranks import start_fork_server
from tests.helpers.patience import patient

REPOSITORY = Path(__file__).resolve().parents[2]
CPU_2RANKS = REPOSITORY / "recipes" / "accelerate" / "cpu_2ranks.yaml"
SECONDS = 110
TOLD = "told.txt"


@dataclass(frozen=True)
class Program:
    """Processes that run; what they print goes to a file in their folder."""

    processes: Sequence[ForkServerProcess]
    folder: Path

    def output(self) -> str:
        """All that they printed, once they have ended; one that fails ends them all, and the test."""
        deadline = time.monotonic() + patient(SECONDS)
        while (
            running := [process for process in self.processes if process.is_alive()]
        ) and time.monotonic() < deadline:
            if any(process.exitcode for process in self.processes):
                break
            connection.wait([process.sentinel for process in running], deadline - time.monotonic())
        for process in running:
            process.kill()
            process.join()
        text = (self.folder / TOLD).read_text()
        assert [process.exitcode for process in self.processes] == [0] * len(self.processes), text
        return text


def start(
    folder: Path, script: Path, *arguments: str, ranks: int = 1, environment: Mapping[str, str] | None = None
) -> Program:
    """A script in a folder of its own, on the CPU, in so many processes that know of each other."""
    start_fork_server()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    launched |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        mine = launched | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        what = (str(script), arguments, str(folder), {"ACCELERATE_USE_CPU": "true", **(environment or {}), **mine})
        processes.append(multiprocessing.get_context("forkserver").Process(target=_run, args=what, daemon=True))
        processes[-1].start()
    return Program(processes, folder)


def older_names(text: str) -> list[str]:
    """Warnings, in what a program printed, that it gave an argument for checkpointing by an older name."""
    return [line for line in text.splitlines() if "`gradient_checkpointing" in line and "is deprecated" in line]


def launched_by(config: Path) -> dict[str, str]:
    """What ``accelerate launch`` tells its processes of a launch config."""
    flags = ["--config_file", str(config), "--main_process_port", "0", "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(flags))
    names = ("ACCELERATE_", "PARALLELISM_CONFIG_", "FSDP_")
    return {name: value for name, value in prepare_multi_gpu_env(args).items() if name.startswith(names)}


def _run(script: str, arguments: Sequence[str], folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    with open(TOLD, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)  # since processes share the file
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
