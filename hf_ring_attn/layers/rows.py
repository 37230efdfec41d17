"""Sums, means, last values and cumulative sums of rows that a ring shares. A number a row travels, or one a chunk.

x: [B, T, ...], this rank's tokens. Tokens of the ring's own padding never count. Gradients follow one rule, that of
`gather_sequence`: if every rank computes a loss from the result, the mean of gradients over ranks is right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import check, check_tensor
from ..comm.ring import Ring
from ..dtypes import FLOATS, INTEGERS, accumulate_dtype
from ..errors import BadShape
from ..sharding.layout import Layout
from .collectives import gather_sequence, sum_over_ring


def sum_row(x: Tensor, ring: Ring, layout: Layout, mask: Tensor | None = None) -> Tensor:
    """[B, ...]: ``x.sum(1)`` of whole rows, over the tokens that ``mask`` [B, T] counts; None: over all.

    Floats are summed in float32 (float64 for float64) and rounded once to x's dtype; integers and bools in int64.
    """
    return _sum(x, ring, layout, mask).to(_like(x))


def mean_row(x: Tensor, ring: Ring, layout: Layout, mask: Tensor | None = None) -> Tensor:
    """[B, ...]: the mean of the tokens that ``mask`` [B, T] counts, summed as in `sum_row`; 0 for a row without any."""
    check(x.dtype in FLOATS, "x.dtype", x.dtype, " or ".join(map(str, FLOATS)))
    total = _sum(x, ring, layout, mask)
    counted = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.ne(0)
    count = _sum(counted, ring, layout, None).clamp(min=1)
    return (total / count.view(-1, *[1] * (total.dim() - 1))).to(x.dtype)


def last_of_row(x: Tensor, ring: Ring, layout: Layout, mask: Tensor | None = None) -> Tensor:
    """[B, ...]: the value at the last token of each row that ``mask`` [B, T] counts, bit for bit.

    A row without such a token gives its first token's value, as transformers' pooling for classification does.
    """
    counted = _counted(x, layout, mask)
    if not layout.length:
        raise BadShape("x", tuple(x.shape), "it must have a token at least")
    places = layout.positions().to(x.device)
    held = places.expand(x.shape[:2])
    held = held if counted is None else torch.where(counted, held, 0)
    last = ring.gather(held.amax(1), "searched last tokens").wait()[0].amax(0)
    here = places == last[:, None]  # [B, T]; a single True in the ring
    own = x[torch.arange(len(x), device=x.device), here.int().argmax(1)]
    is_own = here.any(1).view(-1, *[1] * (own.dim() - 1))
    return sum_over_ring(torch.where(is_own, own, torch.full_like(own, -0.0)), ring)  # x + -0.0 is x, also for -0.0


def cumsum_row(x: Tensor, ring: Ring, layout: Layout, mask: Tensor | None = None) -> Tensor:
    """[B, T, ...]: this rank's tokens of ``x.cumsum(1)`` of whole rows, over the tokens that ``mask`` [B, T] counts.

    Summed as in `sum_row`. What travels is one sum a chunk, in the order of the row.
    """
    chunks: Tensor = _kept(x, layout, mask).unflatten(1, (layout.chunks, layout.chunk))
    within: Tensor = chunks.cumsum(2, dtype=accumulate_dtype(x.dtype))
    if layout.chunk == 0:
        return within.flatten(1, 2).to(_like(x))
    totals = within[:, :, -1]  # [B, chunks, ...]: a row of chunks, each of one token
    of_chunks = Layout(layout.chunks * layout.world_size, layout.world_size, layout.rank, layout.owners)
    every = gather_sequence(totals, ring, of_chunks)
    # Not every.cumsum(1) - every: a large chunk would take the digits of those before it.
    before = torch.cat([torch.zeros_like(every[:, :1]), every[:, :-1].cumsum(1)], 1)
    return (within + of_chunks.shard(before, 1).unsqueeze(2)).flatten(1, 2).to(_like(x))


def _sum(x: Tensor, ring: Ring, layout: Layout, mask: Tensor | None) -> Tensor:
    """The sum in the dtype in which it is made."""
    return sum_over_ring(_kept(x, layout, mask).sum(1, dtype=accumulate_dtype(x.dtype)), ring)


def _kept(x: Tensor, layout: Layout, mask: Tensor | None) -> Tensor:
    """``x`` with zeros for tokens that do not count, whatever they hold."""
    counted = _counted(x, layout, mask)
    if counted is None:
        return x
    return torch.where(
        counted.view(*counted.shape, *[1] * (x.dim() - 2)), x, torch.zeros((), dtype=x.dtype, device="cpu").to(x)
    )


def _counted(x: Tensor, layout: Layout, mask: Tensor | None) -> Tensor | None:
    """[B or 1, T] bool: the tokens that count; None: all of them."""
    check_tensor("x", x, (*FLOATS, *INTEGERS, torch.bool))
    if x.dim() < 2 or x.shape[1] != layout.local_length:
        raise BadShape("x", tuple(x.shape), f"it must be [B, {layout.local_length}, ...]")
    if mask is not None:
        check_tensor("mask", mask, (*FLOATS, *INTEGERS, torch.bool))
        if mask.shape != x.shape[:2]:
            raise BadShape("mask", tuple(mask.shape), f"it must be {tuple(x.shape[:2])}, one entry for each token of x")
        mask = mask.ne(0)
    if layout.padded == layout.length:
        return mask
    real = (layout.positions() < layout.length).to(x.device)[None]
    return real if mask is None else mask & real


def _like(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.int64
