"""Provenance of a number: command, commit, hardware and versions, for the head of each saved run."""

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
"""The checkout; for an installed package, a folder outside any repository of ours."""
PACKAGES = ("hf-ring-attn", "torch", "transformers", "accelerate")
GPU_PACKAGES = ("triton", "flash-attn-4", "nvidia-cutlass-dsl", "flash-attn", "ring-flash-attn")
COMMIT = "BENCHMARK_COMMIT"
"""Environment variable with the commit of a copy sent to a GPU machine; it takes precedence over .git."""


def facts() -> dict[str, Any]:
    """The head of a saved run: command, commit, hardware and versions, without host names or paths.

    Call it before measuring, since it records the load, and after `torch.cuda.set_device`, since it initializes CUDA.
    """
    given = os.environ.get(COMMIT)
    changes = None if given else _git("status", "--porcelain", ":(exclude)recipes/results")
    return {
        "command": command(),
        "date": datetime.date.today().isoformat(),
        "commit": given or _git("rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "hardware": _hardware(),
        "load_average_at_start": os.getloadavg()[0],
        "versions": _versions(),
    }


def command() -> str:
    """The command line of this process, from the repository's root; under torchrun that of all ranks."""
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
    """Git's output; None without git or outside our repository: a package may be installed inside another one."""
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
    """The version of NVIDIA's driver; None if nvidia-smi does not report it."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    run = subprocess.run(query, capture_output=True, text=True, check=False)
    return run.stdout.split()[0] if run.returncode == 0 and run.stdout.split() else None


def _versions() -> dict[str, str]:
    """Versions of the installed packages, and of the GPU stack if there are GPUs."""
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
