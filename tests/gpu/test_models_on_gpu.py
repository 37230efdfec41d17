"""Models in a ring of two ranks over NCCL, against one GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.launch import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_models_of_every_kind_give_one_gpus_answer() -> None:
    assert "cases, 0 wrong" in run_ranks("model_ranks", 2, nccl=True, seconds=500)
