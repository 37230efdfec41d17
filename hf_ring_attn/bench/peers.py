"""Other packages' context parallelism, through their public functions, on the same workload in the same run.

Each package is imported only on request; one that is missing or unsupported reports why.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .contenders import Contender, differentiated
from .workload import Workload

Made = tuple[str, Callable[[], Contender]]


def ring_flash_attn(work: Workload) -> Iterator[Made]:
    """ring-flash-attn's zigzag ring and its llama3 gather. It needs flash-attn 2."""
    local = work.tokens // dist.get_world_size()
    group: Any = dist.group.WORLD

    def zigzag() -> Contender:
        module = _ring_flash_attn()

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = module.zigzag_ring_flash_attn_func(q, k, v, causal=True, group=group)
            return out

        return differentiated(function, work.inputs(local, 0), local / work.tokens)

    def llama3() -> Contender:
        module = _ring_flash_attn()
        ends = torch.tensor([0, work.tokens], device=work.device, dtype=torch.int32)
        ranks = dist.get_rank(), dist.get_world_size()
        *lengths, keys = module.llama3_flash_attn_prepare_cu_seqlens(ends, True, *ranks)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = module.llama3_flash_attn_varlen_func(
                q[0], k[0], v[0], *lengths, heads_k_stride=1, local_k_slice=keys, causal=True, group=group
            )
            return out[None]

        return differentiated(function, work.inputs(local, 0), local / work.tokens)

    yield "ring-flash-attn zigzag", zigzag
    yield "ring-flash-attn llama3", llama3


def _ring_flash_attn() -> Any:
    """Imports the package, without its transformers adapter if that does not fit the installed version."""
    try:
        return importlib.import_module("ring_flash_attn")
    except ImportError as error:
        if "transformers" not in str(error):
            raise
    nothing: Any = types.ModuleType("ring_flash_attn.adapters")
    nothing.substitute_hf_flash_attn = nothing.update_ring_flash_attn_params = None
    sys.modules["ring_flash_attn.adapters"] = nothing
    return importlib.import_module("ring_flash_attn")


def torch_cp(work: Workload) -> Iterator[Made]:
    """torch's own context parallelism, with each of its kernels."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    local = work.tokens // dist.get_world_size()
    mesh = init_device_mesh(work.device.type, (dist.get_world_size(),))

    def with_backend(backend: SDPBackend) -> Callable[[], Contender]:
        @contextmanager
        def inside() -> Iterator[None]:
            row = torch.zeros(1, work.tokens, device=work.device)  # it reads a buffer's length
            with sdpa_kernel(backend), context_parallel(mesh, buffers=[row], buffer_seq_dims=[1]):
                yield

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        given = [x.transpose(1, 2).contiguous() for x in work.inputs(local, 0)]
        return lambda: differentiated(function, given, local / work.tokens, inside)

    yield "torch CP, flash", with_backend(SDPBackend.FLASH_ATTENTION)
    yield "torch CP, cuDNN", with_backend(SDPBackend.CUDNN_ATTENTION)


class _Exchanged(torch.autograd.Function):
    """All-to-all from a shard of the tokens with all heads to all tokens with a shard of the heads, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool) -> Tensor:
        ctx.to_heads = to_heads
        return _exchanged(x, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, not ctx.to_heads), None


def _exchanged(x: Tensor, to_heads: bool) -> Tensor:
    ranks = dist.get_world_size()
    _, tokens, heads, width = x.shape
    if to_heads:
        leaving = x.reshape(tokens, ranks, heads // ranks, width).transpose(0, 1).contiguous()
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving)
        return arriving.reshape(1, ranks * tokens, heads // ranks, width)
    leaving = x.reshape(ranks, tokens // ranks, heads, width).contiguous()
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving)
    return arriving.transpose(0, 1).reshape(1, tokens // ranks, ranks * heads, width)


def ulysses(work: Workload) -> Iterator[Made]:
    """Ulysses: an all-to-all from tokens to heads before attention, and one back. Needs a key head per rank or more."""
    local = work.tokens // dist.get_world_size()

    def through(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Contender]:
        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            whole = (_Exchanged.apply(x, True) for x in (q, k, v))  # type: ignore[no-untyped-call]
            out: Tensor = _Exchanged.apply(attention(*whole), False)  # type: ignore[no-untyped-call]
            return out

        return lambda: differentiated(function, work.inputs(local, 0), local / work.tokens)

    def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        package: Any = importlib.import_module("flash_attn.cute")
        found = package.flash_attn_func(q, k, v, causal=True)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    yield "Ulysses, flash-attn-4", through(flash4)
    yield "Ulysses, cuDNN", through(cudnn)


PEERS: dict[str, Callable[[Workload], Iterator[Made]]] = {
    "ring-flash-attn": ring_flash_attn, "torch-cp": torch_cp, "ulysses": ulysses,
}  # fmt: skip
