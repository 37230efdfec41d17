"""The ring on NCCL and by pulls, on as many GPUs as there are, up to four; and of eight ranks that share them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu


def told(program: str, ranks: int, gpus: int) -> str:
    """What the ranks of a program say, all of whom must end well."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    run = subprocess.run(
        [*launcher, "-m", f"tests.gpu.{program}"], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("ranks", [2, 4])
def test_pulls_and_messages_have_the_same_right_bits_every_time(ranks: int) -> None:
    assert "cases and 4 x 50 passes, 0 wrong" in told("pulls_ranks", ranks, ranks)


def test_eight_ranks_by_pulls_are_right_on_any_number_of_gpus() -> None:
    assert " passes, 0 wrong" in told("pulls_ranks", 8, 1)


def test_layers_around_attention_may_be_replayed_as_graphs() -> None:
    assert "6 compiled batches, 0 wrong" in told("graph_ranks", 2, 2)
