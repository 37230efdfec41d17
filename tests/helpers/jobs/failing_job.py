"""Run by test_trainer.py: rank 1 raises in the middle of its third forward, between two layers."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import hf_ring_attn  # noqa: F401 - registers ring_fp32
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import trainer_of
from tests.helpers.models.tiny_models import tiny


def main() -> None:
    model: Any = tiny("llama", "ring_fp32")
    forwards = 0

    def fail(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 3 and os.environ["RANK"] == "1":
            raise OSError(f"the disk of rank 1 is full at {time.time()}")

    model.model.layers[0].register_forward_hook(fail)
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(Run(why="", steps=10), Mesh(cp=2), folder, model).train()


if __name__ == "__main__":
    main()
