"""The idea: every token has the same weight in the loss, whichever rank has it.

Let w_r be the weight of rank r's tokens: loss = sum_r w_r * sum_t x_t. The gradient of a sum is its weight w_r; that of
a mean of n tokens is n * w_r. If w_r differs among ranks, as 1 / n_r with a rank's own count does, the ranks refuse.

A program may also give each token its own weight. These may be any, unless every rank divided its weights by their own
sum: then they have one sum on every rank, or the same ratios, and yet they are others. A number by which tokens were
divided or multiplied one by one, before any sum, is compared by itself.

No steps are seen of a compiled loss, of an autograd function of the program, and of a gradient that it makes by hand.
There the gradient of the logits shows the weight: that of a cross entropy is w * (softmax(logits) - onehot(label)).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .calls import Call

SUMS = {"sum", "nansum"}
MEANS = {"mean", "nanmean"}
PRODUCTS = {"dot", "vdot", "inner", "mv", "mm", "bmm", "matmul", "__matmul__", "__rmatmul__", "einsum", "tensordot"}
BY_ONE_NUMBER = {
    "div", "divide", "true_divide", "truediv", "itruediv", "mul", "multiply", "rmul", "imul",
    "gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal",
}  # fmt: skip
"""Functions of tokens and one number, perhaps: quotients, products, comparisons."""

SAME_WEIGHT = 1e-5, 1e-2
"""Relative, in float32 and in 16 bits: weights of tokens that are computed in another way differ by rounding."""
MOST_WEIGHTS = 8
"""The most different weights of tokens that ranks compare; a loss with more has one for each document, perhaps."""
MOST_EACH = 4
"""The most tensors of a number for each token, from the loss on, whose gradients are compared."""
SUMMARY = 3 + MOST_WEIGHTS + 1
"""The numbers in a summary of weights."""


def mean_of(call: Call, result: Tensor) -> int | Tensor | None:
    """Returns the number of tokens whose mean a function took; 1: it took their sum; None: neither, of whole rows."""
    name, options = call.name, call.options
    reduction = options.get("reduction")
    if result.numel() > call.share.rows:
        return None
    if name in SUMS | PRODUCTS or reduction == "sum":
        return 1
    if name not in MEANS and reduction not in ("mean", "batchmean"):
        return None
    if "ignore_index" in options and not options["target"].is_floating_point():
        target, weight = options["target"], options.get("weight")
        is_labelled = target != options["ignore_index"]
        return torch.sum(is_labelled if weight is None else weight[target.where(is_labelled, 0)] * is_labelled)
    if name == "nanmean":
        return (~call.x.isnan()).sum()
    if call.share.axis(call.x.shape) is None:
        return call.x.numel() // result.numel()
    return call.share.rows * (call.share.tokens - len(call.share.padding))


def divisor_of(call: Call) -> float | Tensor | None:
    """Returns by what a function divides or multiplies tokens, or compares them, if that may be a number of tokens."""
    if call.name.strip("_") not in BY_ONE_NUMBER or call.x.numel() <= call.share.rows:  # a sum's gradient tells
        return None
    by = next((one for one in (*call.args, *call.kwargs.values()) if one is not call.x), None)
    if isinstance(by, Tensor):  # one number, or one of each row; else each token has its own
        return by if by.numel() in (1, call.share.rows) and not by.requires_grad else None
    return float(by) if isinstance(by, (int, float)) and by else None


def summaries(in_sums: list[Tensor], each: list[Tensor], rows: int, tokens: int, device: torch.device) -> Tensor:
    """[1 + `MOST_EACH`, `SUMMARY`] float64: summaries of weights in all sums and means, and of those of each token.

    A summary has the sum of weights; of rows their sums, and the only weight beside 0 of each (times the row's number,
    so that one number stands for all rows); and different weights beside 0, in order. nan: there is none.

    Args:
        each: gradients of numbers of tokens, [B * T] or of fewer tokens.
    """
    found = torch.full((1 + MOST_EACH, SUMMARY), math.nan, dtype=torch.float64, device=device)
    for summary, some in zip(found, [in_sums, *([x] for x in each)], strict=False):
        x = torch.cat([summary[:0], *(part.to(device) for part in some)])
        summary[0] = x.sum()
        if x.numel() == rows * tokens:
            of_rows = x.view(rows, tokens)
            size = of_rows.abs()
            most, least = size.amax(1), size.masked_fill(size == 0, math.inf).amin(1)
            only = most.where(most - least <= SAME_WEIGHT[0] * most, math.nan)
            numbers = torch.arange(1, rows + 1, dtype=x.dtype, device=device)
            summary[1:3] = torch.stack([of_rows.sum(1), only]) @ numbers
        x = x.sort().values
        again = torch.cat([x[:1].isnan(), x[1:] == x[:-1]]) | (x == 0)
        different = x.masked_fill(again, math.nan).sort().values[: MOST_WEIGHTS + 1]
        summary[3 : 3 + len(different)] = different
    return found


def are_of_a_rank(table: Tensor, each_counts: list[int], in_16_bits: bool) -> bool:
    """Returns True if tokens of some ranks have another weight.

    Args:
        table: [R, 1 + `MOST_EACH`, `SUMMARY`] of all ranks. each_counts: how many tensors of a number for each token
            the ranks have; they are compared if all have as many.
    """
    relative = SAME_WEIGHT[in_16_bits]
    in_sums, *each = table.unbind(1)
    weights = _different(in_sums)
    if weights is not None and _differ(weights, relative):
        return True
    return len(set(each_counts)) == 1 and any(_are_normalized(x, relative) for x in each)


def _are_normalized(x: Tensor, relative: float) -> bool:
    """Returns True if weights have one sum on every rank, or the same ratios, but are others. ``x``: [R, `SUMMARY`]."""
    total, of_rows, only = x[:, :3].T[..., None]
    if only.isfinite().all() and _differ(only, relative) and not _differ(of_rows, relative):
        return True
    weights = _different(x)
    if weights is None or len(weights) < len(x) or not _differ(weights, relative):
        return False
    return not _differ(total if weights.shape[1] == 1 else weights / weights[:, :1], relative)


def _different(x: Tensor) -> Tensor | None:
    """[r, n] different weights of the ranks that have any, of [R, `SUMMARY`]; None: too many, or not n on each."""
    x = x[~x[:, 3].isnan(), 3:]
    counts = (~x.isnan()).sum(1)
    if not len(x) or counts.max() > MOST_WEIGHTS or counts.min() < counts.max():
        return None
    return x[:, : int(counts[0])]


def _differ(x: Tensor, relative: float) -> bool:
    """Returns True if the values of any column of [R, n] differ."""
    least, most = x.amin(0), x.amax(0)
    return bool((most - least > relative * torch.maximum(most.abs(), least.abs())).any())


SAMPLE = 16
"""Tokens whose logits are copied."""
RESIDUAL = 1e-3, 0.05
"""The most that a gradient may differ from a cross entropy's, relative to its weight, in float32 and in 16 bits."""


class Sample(NamedTuple):
    """A few tokens' logits [n, V], and their places among all of a rank's tokens [n]."""

    logits: Tensor
    places: Tensor

    @staticmethod
    def of(logits: Tensor, labels: Tensor | None) -> Sample:
        """Copies logits of tokens that have labels. logits: [B, T, V]; labels: [B, T], shifted on the whole row."""
        rows = logits.flatten(0, 1)
        order = torch.linspace(1.0, 0.5, len(rows), device=rows.device)
        if labels is not None:
            order = order * (labels.flatten() >= 0)
        places = order.topk(min(SAMPLE, len(rows))).indices
        return Sample(rows[places], places)

    def weights(self, gradient: Tensor) -> Tensor:
        """[B * T] float64: the weight of tokens that have a gradient, if it is one; nan if it is no cross entropy."""
        rows = gradient.detach().flatten(0, 1)
        found, p = rows[self.places].double(), self.logits.double().softmax(-1)
        counted = found.abs().amax(-1) > 0
        at = found.argmax(-1, keepdim=True)
        each = (found.gather(-1, at) / p.gather(-1, at))[:, 0]
        apart = found - each[:, None] * p
        apart = apart.scatter(-1, apart.argmin(-1, keepdim=True), 0.0).abs().sum(-1)
        size = each.where(counted, 0.0).amax()
        is_one = (apart <= RESIDUAL[gradient.dtype.itemsize == 2] * size) & ((each - size).abs() <= 0.01 * size)
        weight = size.where((is_one | ~counted).all() & counted.any(), math.nan)
        read: Tensor = weight * (torch.linalg.vector_norm(rows, math.inf, dim=-1) > 0)
        return read
