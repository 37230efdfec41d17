"""4-bit weights under FSDP2 for live ranks, with the copies of a GPU: what its kernel does to numbers that are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from hf_ring_attn.integration.model import quantized
from tests.helpers.jobs import kinds_jobs
from tests.helpers.jobs.kinds_jobs import Kind, Trained
from tests.helpers.jobs.plain_jobs import attempt
from tests.helpers.jobs.runs import Mesh

NOT_A_NUMBER = 0x7FFF


@contextmanager
def copies_of_a_gpu() -> Iterator[None]:
    """`torch._foreach_copy_` as its kernel for GPUs does it: 16-bit floats go by way of float32."""

    def copy(to: Sequence[Tensor], values: Sequence[Tensor], non_blocking: bool = False) -> None:
        for into, x in zip(to, values, strict=True):
            into.copy_(x)
            if x.dtype == into.dtype and x.dtype in (torch.bfloat16, torch.float16):
                into.view(torch.int16)[x.isnan()] = NOT_A_NUMBER

    with mock.patch.object(torch, "_foreach_copy_", copy):
        yield


class Linear4bit(nn.Module):
    """The weight of bitsandbytes' layer of that name: codes in a column of floating numbers."""

    def __init__(self, words: int, dtype: torch.dtype) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (words * dtype.itemsize, 1), dtype=torch.uint8)
        self.weight = nn.Parameter(codes.view(-1).view(dtype)[:, None], requires_grad=False)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.detach().view(-1).view(torch.uint8).clone())
        return x


class Block(nn.Module):
    def __init__(self, words: int, dtype: torch.dtype, trained: bool) -> None:
        super().__init__()
        self.packed = Linear4bit(words, dtype)
        self.other = nn.Linear(8, 8) if trained else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.other(self.packed(x))
        return found


def changed(
    words: int, storage: torch.dtype, policy: torch.dtype, trained: bool, on_host: bool, sharded: bool, prepared: bool
) -> list[int]:
    """How many bytes of a gathered weight are others than before it was sharded, in each of two forwards.

    Args:
        words: of the weight, in ``storage``. policy: the dtype in which FSDP2 computes. trained: a trained weight is
            gathered with it. on_host: shards wait there. sharded: over the ranks; else each has a mesh of its own.
        prepared: as a ring does it.
    """
    torch.manual_seed(0)
    model = Block(words, storage, trained)
    before = model.packed.weight.detach().view(-1).view(torch.uint8).clone()
    mesh = init_device_mesh("cpu", (2,) if sharded else (2, 1), mesh_dim_names=("one",) if sharded else ("each", "one"))
    offload: Any = CPUOffloadPolicy(pin_memory=False) if on_host else OffloadPolicy()
    fully_shard(model, mesh=mesh["one"], mp_policy=MixedPrecisionPolicy(param_dtype=policy), offload_policy=offload)
    if prepared:
        quantized.gather_bytes(model)
    with copies_of_a_gpu(), torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 8, dtype=policy))
    return [int((x != before).sum()) if len(x) == len(before) else len(before) for x in model.packed.seen]


def told_of_other_bytes() -> str:
    """The error of a forward whose all-gather changes bytes."""
    torch.manual_seed(0)
    model = Block(64, torch.bfloat16, trained=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    quantized.gather_bytes(model)
    kind = quantized.gathered_as_bytes(FSDPParam)
    right = kind.all_gather_inputs.fget
    wrong = property(lambda weight: [x ^ 1 for x in right(weight)])
    with mock.patch.object(kind, "all_gather_inputs", wrong), torch.no_grad():
        raised = attempt(model, torch.ones(1, 8))
    return "nothing" if raised is None else f"{raised[0]}: {raised[1]}"


def trained(kind: Kind, mesh: Mesh, prepared: bool = True) -> Trained:
    """As `kinds_jobs.trained`, with the copies of a GPU. ``prepared``: as a ring does it."""
    unprepared = nullcontext() if prepared else mock.patch.object(quantized, "_packed", return_value=())
    with copies_of_a_gpu(), unprepared:
        return kinds_jobs.trained(kind, mesh)
