"""accelerate's singletons, as they are in processes that are not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def of_two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """In a process of a run on two GPUs, before any Accelerator. What its `PartialState` is made of."""
    process = {
        "_cpu": False, "backend": "nccl", "device": torch.device("cpu"), "debug": False, "fork_launched": False,
        "distributed_type": DistributedType.MULTI_GPU, "num_processes": 2, "process_index": 0, "local_process_index": 0,
    }  # fmt: skip
    monkeypatch.setattr(PartialState, "_shared_state", process)
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    return process
