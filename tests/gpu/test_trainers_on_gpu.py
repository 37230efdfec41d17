"""TRL's trainers in a ring of two ranks on GPUs against one GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.launch import compared_with_one_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL"),
]


def test_two_ranks_train_as_one_gpu_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ", 0 wrong" in compared_with_one_gpu("trainers_ranks", tmp_path, monkeypatch, 400)
