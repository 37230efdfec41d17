"""Starts programs of several ranks, which share GPUs where there are fewer GPUs than ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.helpers.blocks import REPOSITORY

NCCL_ON_ONE_GPU = REPOSITORY / "tests" / "gpu" / "one_gpu"
"""With this folder on PYTHONPATH, ranks that share a GPU may use NCCL."""


def run(command: Sequence[str], seconds: float, folder: Path = REPOSITORY, nccl_on_one_gpu: bool = False) -> str:
    """What a Python program printed, which must end well in time: ``command`` is what follows ``python``."""
    paths = [str(REPOSITORY), *(part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)]
    if nccl_on_one_gpu:
        paths.insert(0, str(NCCL_ON_ONE_GPU))
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, **offline, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_ranks(program: str, ranks: int, *arguments: str, nccl: bool, seconds: float = 300) -> str:
    """What the ranks of a module of tests/gpu printed. ``nccl``: they use it even where they share a GPU."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    sharing = torch.cuda.device_count() < ranks
    return run([*launcher, "-m", f"tests.gpu.{program}", *arguments], seconds, nccl_on_one_gpu=sharing and nccl)


def compared_with_one_gpu(program: str, folder: Path, patch: pytest.MonkeyPatch, seconds: float) -> str:
    """What two ranks of a program that uses `compared` printed, after a run of it on one GPU."""
    alone = str(folder / "alone.pt")
    with patch.context() as one_gpu:
        one_gpu.setenv("CUDA_VISIBLE_DEVICES", "0")  # with more Trainer would use DataParallel
        run(["-m", f"tests.gpu.{program}", "--save", alone], 300)
    return run_ranks(program, 2, "--compare", alone, nccl=True, seconds=seconds)
