"""Differentiable collectives over a row: gather whole sequences or parts, sum over the ring."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.first_order import first_order_only
from ..comm.ring import Ring
from ..dtypes import accumulate_dtype
from ..sharding.layout import Layout


class _GatherSequence(torch.autograd.Function):
    """All-gather [B, T, ...] to [B, S, ...]; the backward is a reduce-scatter in float32, or W times a rank's share.

    Args:
        alike: all ranks have the same gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring, layout: Layout, alike: bool) -> Tensor:
        ctx.ring, ctx.layout, ctx.alike = ring, layout, alike
        return layout.merge(ring.gather(x, "gathered a sequence").wait()[0])[:, : layout.length].contiguous()

    @staticmethod
    @first_order_only("a row that was gathered")
    def backward(ctx: Any, _saved: tuple[()], gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.alike:
            return ctx.layout.shard(ctx.layout.pad(gradient, 1), 1) * ctx.ring.size, None, None, None
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        leaving = ctx.layout.split(ctx.layout.pad(real, 1)).to(accumulate_dtype(real.dtype))
        mine = ctx.ring.reduce_scatter(leaving).to(real.dtype)
        return torch.view_as_complex(mine) if gradient.is_complex() else mine, None, None, None


def gather_sequence(x: Tensor, ring: Ring, layout: Layout, alike: bool = False) -> Tensor:
    """All-gathers tokens [B, T, ...] to sequences [B, S, ...] in order, without padding. Differentiable.

    Args:
        alike: every rank computes the same loss from it, so the backward sends nothing.
    """
    return x if ring.size == 1 else _GatherSequence.apply(x, ring, layout, alike)  # type: ignore[no-untyped-call]


class _GatherParts(torch.autograd.Function):
    """All-gather [...] to [W, ...] in rank order; the backward is a reduce-scatter in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return ring.gather(x, "gathered parts of all ranks").wait()[0]

    @staticmethod
    @first_order_only("parts that were gathered")
    def backward(ctx: Any, _saved: tuple[()], gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ring.reduce_scatter(gradient.to(accumulate_dtype(gradient.dtype))).to(gradient.dtype), None


def gather_parts(x: Tensor, ring: Ring) -> Tensor:
    """All-gathers parts [...] of one shape to [W, ...]. Differentiable: the gradients that ranks have add up."""
    return x[None] if ring.size == 1 else _GatherParts.apply(x, ring)  # type: ignore[no-untyped-call]


class _SumOverRing(torch.autograd.Function):
    """All-reduce, forward and backward: each rank's loss may use the sum, so their gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return ring.total(x)

    @staticmethod
    @first_order_only("a sum over the ring")
    def backward(ctx: Any, _saved: tuple[()], gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ring.total(gradient), None


def sum_over_ring(x: Tensor, ring: Ring) -> Tensor:
    """All-reduces ``x``. Differentiable: the gradient of a loss that every rank computes from it is right once averaged
    over ranks."""
    return x if ring.size == 1 else _SumOverRing.apply(x, ring)  # type: ignore[no-untyped-call]


class _MeanGradient(torch.autograd.Function):
    """Identity; the backward is the mean over the ring."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return x.view_as(x)

    @staticmethod
    @first_order_only("whole rows")
    def backward(ctx: Any, _saved: tuple[()], gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ring.mean(gradient), None


def mean_gradient(x: Tensor, ring: Ring) -> Tensor:
    """Returns ``x``, whole rows of which each rank will compute its part: its gradient is then the same on all ranks.

    The gradient of a rank's part must be W times what its tokens add to that of the loss, as after `gather_sequence`.
    """
    return x if ring.size == 1 or not x.requires_grad else _MeanGradient.apply(x, ring)  # type: ignore[no-untyped-call]
