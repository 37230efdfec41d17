"""Kinds of fine-tuning in a ring of two GPUs against one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
PROGRAM = ["-m", "tests.gpu.kinds_ranks"]


def test_two_gpus_train_as_one_does(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    alone, launcher = str(tmp_path / "alone.pt"), ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    one_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}  # with more Trainer would use DataParallel
    subprocess.run([sys.executable, *PROGRAM, "--save", alone], env=one_gpu, check=True, timeout=300)
    ring = [sys.executable, *launcher, *PROGRAM, "--compare", alone]
    run = subprocess.run(ring, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0 and ", 0 wrong" in run.stdout, run.stdout + run.stderr
