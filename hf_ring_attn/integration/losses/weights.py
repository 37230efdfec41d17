"""Weights of tokens in a loss, as numbers that ranks send to each other: do tokens of some ranks count more?

The gradient of a sum, over the number of tokens in a mean, is the weight of each of its tokens: it must be the same on
every rank. A weight of each token by itself may be any; but not if every rank divided its weights by their own sum.
Then they have one sum on every rank, or the same ratios, and are others.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

SAME_WEIGHT = 1e-5, 1e-2
"""Relative, in float32 and in 16 bits: weights of tokens that are computed in another way differ by rounding."""
MOST_WEIGHTS = 8
"""The most different weights of tokens that ranks compare; a loss with more has one for each document, perhaps."""
MOST_EACH = 4
"""The most tensors of a number for each token, from the loss on, whose gradients are compared."""
_ONE = 3 + MOST_WEIGHTS + 1
"""Numbers of such a tensor."""
_NAN = struct.unpack("<q", struct.pack("<d", math.nan))[0]
NO_WEIGHTS: list[int] = [0, *(_NAN,) * (MOST_WEIGHTS + 1 + MOST_EACH * _ONE)]
"""`weight_facts` no weights."""


def weight_facts(
    weights: list[Tensor], each: list[Tensor], each_count: int, rows: int, tokens: int, device: torch.device
) -> list[int | Tensor]:
    """Numbers for `are_of_a_rank`, as many on every rank.

    Args:
        weights: of tokens in sums and means. each: gradients of numbers of tokens, [B * T] or of fewer tokens; the
            first `MOST_EACH` of each_count.
    """
    sent = [_different(weights, device)]
    for at in range(MOST_EACH):
        some = [x.to(device) for x in each[at : at + 1]]
        sent += [_sums(some, rows, tokens, device), _different(some, device)]
    return [each_count, *torch.cat(sent).view(torch.int64)]


def are_of_a_rank(sent: tuple[list[int], ...], in_16_bits: bool) -> bool:
    """Returns True if tokens of some ranks count more. ``sent``: each of `weight_facts`, of all ranks."""
    relative, counts = SAME_WEIGHT[in_16_bits], sent[0]
    table = torch.tensor(sent[1:], dtype=torch.int64).view(torch.float64).T  # [R, numbers]
    in_sums = _known(table[:, : MOST_WEIGHTS + 1])
    if in_sums is not None and _apart(in_sums, relative):
        return True
    each = table[:, MOST_WEIGHTS + 1 :].unflatten(1, (MOST_EACH, _ONE)).unbind(1)
    return len(set(counts)) == 1 and any(_are_normalized(x, relative) for x in each)


def _are_normalized(x: Tensor, relative: float) -> bool:
    """Returns True if weights have one sum on every rank, or the same ratios, but are others. ``x``: [R, `_ONE`]."""
    total, of_rows, values = x[:, :3].T[..., None]
    if values.isfinite().all() and _apart(values, relative) and not _apart(of_rows, relative):
        return True
    weights = _known(x[:, 3:])
    if weights is None or len(weights) < len(x) or not _apart(weights, relative):
        return False
    return not _apart(total if weights.shape[1] == 1 else weights / weights[:, :1], relative)


def _different(weights: list[Tensor], device: torch.device) -> Tensor:
    """[`MOST_WEIGHTS` + 1] float64: different weights beside 0, in order; nan where there are no more."""
    found = torch.full((MOST_WEIGHTS + 1,), math.nan, dtype=torch.float64, device=device)
    if weights:
        every = torch.cat(weights).to(device).sort().values
        again = torch.cat([every[:1].isnan(), every[1:] == every[:-1]]) | (every == 0)
        kept = every.masked_fill(again, math.nan).sort().values[: len(found)]
        found[: len(kept)] = kept
    return found


def _sums(some: list[Tensor], rows: int, tokens: int, device: torch.device) -> Tensor:
    """[3] the sum of weights; and of rows: their sums, and the only weight beside 0 of each, or nan.

    Each row's is times the row's number, so that one number stands for all rows.
    """
    found = torch.full((3,), math.nan, dtype=torch.float64, device=device)
    for x in some:
        found[0] = x.sum()
        if x.numel() == rows * tokens:
            of_rows = x.view(rows, tokens)
            size = of_rows.abs()
            most, least = size.amax(1), size.masked_fill(size == 0, math.inf).amin(1)
            only = most.where(most - least <= SAME_WEIGHT[0] * most, math.nan)
            found[1:] = torch.stack([of_rows.sum(1), only]) @ torch.arange(1, rows + 1, dtype=x.dtype, device=device)
    return found


def _known(x: Tensor) -> Tensor | None:
    """[r, n] different weights of the ranks that have any, from [R, m]; None: too many, or ranks have other numbers."""
    x = x[~x[:, 0].isnan()]
    counts = (~x.isnan()).sum(1)
    if not len(x) or counts.max() > MOST_WEIGHTS or counts.min() < counts.max():
        return None
    return x[:, : int(counts[0])]


def _apart(x: Tensor, relative: float) -> bool:
    """Returns True if the values of any column of [R, n] differ."""
    least, most = x.amin(0), x.amax(0)
    return bool((most - least > relative * torch.maximum(most.abs(), least.abs())).any())
