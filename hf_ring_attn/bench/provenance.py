"""Where a number comes from: command, commit, hardware and versions, for the head of each saved run."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY = PACKAGE.parent
"""The checkout; where the package is installed without one, a folder that git does not know as its own."""
PACKAGES = ("hf-ring-attn", "torch", "transformers", "accelerate")
GPU_PACKAGES = ("triton", "flash-attn-4", "nvidia-cutlass-dsl", "flash-attn", "ring-flash-attn")
COMMIT = "BENCHMARK_COMMIT"
"""The environment variable that tells the commit of a copy, as it is sent to a machine with GPUs: before its .git."""


def facts() -> dict[str, Any]:
    """How the numbers of this process come to be, without the machine's names and places; the head of a saved run.

    Call it before what is measured, since it tells the load at the start; and after `torch.cuda.set_device`, since
    asking for GPUs starts CUDA.
    """
    told = os.environ.get(COMMIT)
    changes = None if told else _git("status", "--porcelain", ":(exclude)recipes/results")
    return {
        "command": command(),
        "date": datetime.date.today().isoformat(),
        "commit": told or _git("rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "hardware": _hardware(),
        "load_average_at_start": os.getloadavg()[0],
        "versions": _versions(),
    }


def command() -> str:
    """The command line of this process, from the repository's root; of all its ranks where torchrun started it."""
    given = os.environ
    words = ["python"]
    if "LOCAL_WORLD_SIZE" in given:
        nodes = int(given.get("GROUP_WORLD_SIZE", "1"))
        words = ["torchrun", *(["--nnodes", str(nodes)] if nodes > 1 else [])]
        words += ["--nproc_per_node", given["LOCAL_WORLD_SIZE"]]
    program = Path(sys.argv[0]).resolve()
    if program.parent == PACKAGE or program.name == "hf-ring-attn":  # neither file would run as torchrun's program
        words += ["-m", PACKAGE.name]
    elif program.is_relative_to(REPOSITORY):
        words.append(str(program.relative_to(REPOSITORY)))
    else:
        words.append(program.name)
    return shlex.join([*words, *(word.replace(f"{REPOSITORY}/", "") for word in sys.argv[1:])])


def _git(*arguments: str) -> str | None:
    """What git says; None where there is no git, or no repository of ours: packages may be installed inside another."""
    if (program := shutil.which("git")) is None or not (REPOSITORY / ".git").exists():
        return None
    run = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    return run.stdout.strip() if run.returncode == 0 else None


def _hardware() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found: dict[str, Any] = {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found["driver"] = _driver()
    return found


def _driver() -> str | None:
    """The version of NVIDIA's driver; None where nvidia-smi does not tell it."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    run = subprocess.run(query, capture_output=True, text=True, check=False)
    return run.stdout.split()[0] if run.returncode == 0 and run.stdout.split() else None


def _versions() -> dict[str, str]:
    """Of what is installed; of what GPUs need, where there are any."""
    gpu = torch.cuda.is_available()
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *(GPU_PACKAGES if gpu else ())):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if gpu:
        found["cuda"] = torch.version.cuda or f"none, hip {torch.version.hip}"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
