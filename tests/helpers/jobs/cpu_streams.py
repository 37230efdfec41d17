"""TRL's activation offloading on a CPU: its own class, given a CPU's streams in place of an accelerator's.

All of its code runs but the pinning of memory, and each copy is made at once. So a test sees which tensors it saves and
gives back, and in which order; it does not see copies that are late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from trl.models.activation_offloading import get_act_offloading_ctx_manager
from trl.trainer import sft_trainer


class Stream(torch.cpu.Stream):
    """A stream whose work is always done."""

    def synchronize(self) -> None:
        pass


@contextmanager
def offloading_on_a_cpu() -> Iterator[list[int]]:
    """SFTTrainers made meanwhile may have ``activation_offloading``. Yields, at index 0, how many copies were made."""
    copies, compute = [0], Stream()

    def copying(_: Stream) -> AbstractContextManager[None]:
        copies[0] += 1
        return nullcontext()

    device = SimpleNamespace(Stream=Stream, stream=copying, current_stream=lambda: compute, empty_cache=lambda: None)

    def make(**arguments: Any) -> Any:
        with (
            mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cpu")),
            mock.patch.object(torch, "get_device_module", return_value=device),
        ):
            return get_act_offloading_ctx_manager(use_pin_memory=False, **arguments)

    with (
        mock.patch.object(sft_trainer, "get_act_offloading_ctx_manager", make),
        mock.patch.object(Tensor, "record_stream"),
    ):
        yield copies
