"""What ranks compute of transformers' own functions, element by element beside one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_5 import modeling_qwen3_5

from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.layers.halo import RowShare, compute_with_halo
from hf_ring_attn.layers.head_parallel import compute_by_heads
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.testing import relative_error


def other_bits(dtype: torch.dtype) -> dict[str, float]:
    """The share of elements, of this rank's tokens, that differ from one process's: of a gated delta rule's output and
    gradients, of a convolution's, and the relative error of the gradient of what heads of Mamba 2 share."""
    length, generator = 509, torch.Generator().manual_seed(0)
    rows = RowShare(Ring.of(None), Layout(length, dist.get_world_size(), dist.get_rank()))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def delta(heads: list[Tensor], shared: list[Tensor], _: list[Tensor]) -> Tensor:
        out: Tensor = modeling_qwen3_5.torch_chunk_gated_delta_rule(
            *shared, heads[0], g=heads[1], beta=heads[2], use_qk_l2norm_in_kernel=True
        )[0]
        return out

    def scan(heads: list[Tensor], shared: list[Tensor], weights: list[Tensor]) -> Tensor:
        out: Tensor = modeling_bamba.mamba2_chunk_scan(*heads, weights[0], *shared, chunk_size=64, dt_softplus=True)
        return out

    kernel = numbers(64, 4)

    def convolution(x: Tensor) -> Tensor:
        out: Tensor = modeling_qwen3_5.causal_conv1d_fn(x.transpose(1, 2), kernel, None, activation="silu")
        return out.transpose(1, 2)

    decay, beta = -0.2 * torch.rand(2, length, 8, generator=generator), numbers(2, length, 8).sigmoid()
    found = {}
    heads, shared = [numbers(2, length, 8, 32), decay, beta], [numbers(2, length, 8, 32), numbers(2, length, 8, 32)]
    found["delta"] = max(_differing(rows, delta, heads, shared, []))
    mixed = [numbers(2, length, 64)]
    alone = convolution(mixed[0])
    mine = compute_with_halo(_local(rows, mixed[0]), rows, 3, convolution)
    found["convolution"] = _share_of_others(rows, alone, mine)
    heads, shared = [numbers(2, length, 8, 16), numbers(2, length, 8)], [numbers(2, length, 1, 8)] * 2
    *_, found["shared"] = _differing(rows, scan, heads, shared, [-torch.rand(8, generator=generator)], relative_error)
    return found


def _local(rows: RowShare, x: Tensor) -> Tensor:
    return rows.layout.shard(rows.layout.pad(x, 1), 1)


def _share_of_others(rows: RowShare, want: Tensor, got: Tensor, measure: Any = None) -> float:
    places = rows.layout.positions()
    real = places < want.shape[1]
    mine, expected = got[:, real], want[:, places[real]]
    return float((mine != expected).double().mean()) if measure is None else float(measure(mine, expected))


def _differing(
    rows: RowShare, compute: Any, heads: list[Tensor], shared: list[Tensor], weights: list[Tensor], measure: Any = None
) -> list[float]:
    """Of the output and the gradients of heads and shared, in this order."""
    whole = [x.clone().requires_grad_() for x in (*heads, *shared)]
    local = [_local(rows, x).requires_grad_() for x in (*heads, *shared)]
    n = len(heads)
    want, got = compute(whole[:n], whole[n:], weights), compute_by_heads(rows, local[:n], local[n:], weights, compute)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(want.dtype)
    wants = [want, *torch.autograd.grad(want, whole, dout)]
    gots = [got, *torch.autograd.grad(got, local, _local(rows, dout))]
    return [_share_of_others(rows, a.detach(), b.detach(), measure) for a, b in zip(wants, gots, strict=True)]
