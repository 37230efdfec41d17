"""Trainers under FSDP2 on a CPU, where accelerate has it on GPUs alone, and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor


def under_fsdp2(trainer: Any, options: dict[str, Any]) -> None:
    """accelerate keeps FSDP2 for GPUs; its code runs on a CPU as well."""
    _give_fsdp2(trainer.accelerator, options)
    trainer.is_fsdp_enabled = True


@contextmanager
def fsdp2_from_the_start(options: dict[str, Any]) -> Iterator[None]:
    """Trainers made meanwhile have FSDP2: some shard their reference when they are made."""

    def init(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _give_fsdp2(self, options)

    original = Accelerator.__init__
    with mock.patch.object(Accelerator, "__init__", init):
        yield


def _give_fsdp2(accelerator: Accelerator, options: dict[str, Any]) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options)
    if options.get("cpu_offload"):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    state = accelerator.state
    state.fsdp_plugin, state.distributed_type = plugin, DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # which every AcceleratorState() copies


def weights_of(model: Any) -> dict[str, Tensor]:
    trained = {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x.clone() for name, x in trained.items()}
    return {name: x.cpu() for name, x in whole.items()}
