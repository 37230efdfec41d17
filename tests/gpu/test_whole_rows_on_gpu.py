"""Losses of whole rows in a ring of two ranks on GPUs against one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.launch import compared_with_one_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_any_loss_is_that_of_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ", 0 wrong" in compared_with_one_gpu("whole_rows_ranks", tmp_path, monkeypatch, 400)
