"""Context parallelism that is not ours, by the registries of docs/upstream: contiguous shards, gathered keys.

It needs the patched accelerate and transformers. `install` registers all that it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import ContextParallelBackend, register_context_parallel_backend
from torch import Tensor
from transformers import AttentionInterface

NAME = "contiguous"
_interface: Any = AttentionInterface  # its installed version has no context_parallel_backends


class _Gather(torch.autograd.Function):
    """The shards [B, H, T, D] of all ranks, one after the other."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: Any) -> Tensor:
        ctx.group, parts = group, [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(parts, shard.contiguous(), group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(ctx.group.size(), 2)[ctx.group.rank()], None


class Contiguous(ContextParallelBackend):  # type: ignore[misc]  # accelerate has no types
    """Rank r holds the r-th of W equal parts of each row."""

    requires_fsdp2 = False
    group: Any = None
    """That of the step which runs."""

    @contextmanager
    def context(
        self, accelerator: Any, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> Iterator[None]:
        group = accelerator.torch_device_mesh["cp"].get_group()
        assert set(buffers) == no_restore_buffers, "it restores none"
        for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
            buffer.set_(buffer.chunk(group.size(), dim)[group.rank()].clone())
        self.group = group
        try:
            yield
        finally:
            self.group = None


BACKEND = Contiguous()


def attention(
    _module: Any, q: Tensor, k: Tensor, v: Tensor, _mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention of this rank's queries to the keys of the whole row."""
    first = 0
    if BACKEND.group is not None:
        first = BACKEND.group.rank() * q.shape[2]
        gather: Any = _Gather.apply
        k, v = gather(k, BACKEND.group), gather(v, BACKEND.group)
    visible = torch.arange(first, first + q.shape[2])[:, None] >= torch.arange(k.shape[2])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def install() -> None:
    """What importing the package of such a backend does."""
    register_context_parallel_backend(NAME, BACKEND)
    _interface.register(NAME, attention, context_parallel_backends=[NAME])
