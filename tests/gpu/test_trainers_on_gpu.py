"""TRL's trainers in a ring of two ranks on GPUs against one GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.launch import run, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL"),
]


def test_two_ranks_train_as_one_gpu_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = str(tmp_path / "alone.pt")
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")  # with more Trainer would use DataParallel
        run(["-m", "tests.gpu.trainers_ranks", "--save", alone], 300)
    assert ", 0 wrong" in run_ranks("trainers_ranks", 2, "--compare", alone, nccl=True, seconds=400)
