"""The idea: every token has the same weight in the loss, whichever rank has it.

Let w_r be the weight of rank r's tokens: loss = sum_r w_r * sum_t x_t. The gradient of a sum is its weight w_r; that of
a mean of n tokens is n * w_r. If w_r differs among ranks, as 1 / n_r with a rank's own count does, the ranks refuse.

A program may also give each token its own weight. These may be any, unless every rank divided its weights by their own
sum: then they have one sum on every rank, or the same ratios, and yet they are others. Or it divided each document's by
its own number of them: then those of a document have one sum on every rank (`groups_of`). A number by which tokens were
divided or multiplied one by one, before any sum, is compared by itself.

No steps are seen of a compiled loss, of an autograd function of the program, and of a gradient that it makes by hand.
There the gradient of the logits shows the weight: that of a cross entropy is w * (softmax(logits) - onehot(label)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .calls import Call
from .whole_counts import MULTIPLES, QUOTIENTS

SUMS = {"sum", "nansum"}
MEANS = {"mean", "nanmean"}
PRODUCTS = {"dot", "vdot", "inner", "mv", "mm", "bmm", "matmul", "__matmul__", "__rmatmul__", "einsum", "tensordot"}
BY_ONE_NUMBER = QUOTIENTS | MULTIPLES | {
    "gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal",
}  # fmt: skip
"""Functions of tokens and one number, perhaps: quotients, products, comparisons."""

SAME_WEIGHT = 1e-5, 1e-2
"""Relative, in float32 and in 16 bits: weights of tokens that are computed in another way differ by rounding."""
MULTIPLE = 1e-4
"""The most that a multiple in float32 may differ from a whole number."""
MOST_WEIGHTS = 8
"""The most different weights of tokens that ranks compare; a loss with more has one for each document, perhaps."""
MOST_EACH = 4
"""The most tensors of a number for each token, from the loss on, whose gradients are compared."""
SUMMARY = 3 + MOST_WEIGHTS + 1
"""The numbers in a summary of weights."""
GROUPS = 3, 1 + MOST_WEIGHTS
"""Groups of tokens are seen in three ways, with these numbers about each (`groups_of`)."""


def mean_of(call: Call, result: Tensor) -> int | Tensor | None:
    """Returns the number of tokens whose mean a function took; 1: it took their sum; None: neither, of whole rows."""
    name, reduction = call.name, call.options.get("reduction")
    if result.numel() > call.share.rows:
        return None
    if name in SUMS | PRODUCTS or reduction == "sum":
        return 1
    if name not in MEANS and reduction not in ("mean", "batchmean"):
        return None
    if (labelled := _labelled(call)) is not None:
        return labelled
    if name == "nanmean":
        return (~call.x.isnan()).sum()
    if call.share.axis(call.x.shape) is None:
        return call.x.numel() // result.numel()
    return call.share.rows * (call.share.tokens - len(call.share.padding))


def _labelled(call: Call) -> Tensor | None:
    """The number of tokens with a target, or the sum of their classes' weights; None: they have no targets."""
    options = call.options
    if "ignore_index" not in options or options["target"].is_floating_point():
        return None
    target, weight = options["target"], options.get("weight")
    is_labelled = target != options["ignore_index"]
    return torch.sum(is_labelled if weight is None else weight[target.where(is_labelled, 0)] * is_labelled)


def summed_by(call: Call, count: int | Tensor) -> float | Tensor:
    """Returns the sum of the weights that a function gave to tokens; nan: unknown, as some may be masked.

    Args:
        count: `mean_of` it.
    """
    if not isinstance(count, int) or count > 1:
        return 1.0
    labelled = _labelled(call)
    return (call.past.selected or math.nan) if labelled is None else labelled


def divisor_of(call: Call) -> float | Tensor | None:
    """Returns what a function divides, multiplies or compares tokens by, if that may be a number of tokens."""
    if call.name.strip("_") not in BY_ONE_NUMBER or call.x.numel() <= call.share.rows:  # a sum's gradient tells
        return None
    by = call.other
    if isinstance(by, Tensor):  # one number, or one of each row; else each token has its own
        return by if by.numel() in (1, call.share.rows) and not by.requires_grad else None
    return float(by) if isinstance(by, (int, float)) and by else None


def summaries(in_sums: list[Tensor], each: list[Tensor], rows: int, tokens: int, device: torch.device) -> Tensor:
    """Summarizes the weights by which a loss adds up numbers of tokens: [1 + `MOST_EACH`, `SUMMARY`] float64.

    The first summary is that of all sums and means, the others are those of ``each``. A summary has the sum of the
    weights; the sum of each row's weights; the only weight of a row that is not 0 (times the row's number, so that one
    number stands for all rows); and the different weights that are not 0, in order. nan stands for what is missing.

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
        different = _different_of(x)[: MOST_WEIGHTS + 1]
        summary[3 : 3 + len(different)] = different
    return found


def _different_of(x: Tensor) -> Tensor:
    """The different values beside 0, in order, and then nan."""
    x = x.sort().values
    again = torch.cat([x[:1].isnan(), x[1:] == x[:-1]]) | (x == 0)
    return x.masked_fill(again, math.nan).sort().values


def groups_of(noted: Mapping[str, list[Tensor]], labels: Tensor | None, device: torch.device) -> Tensor:
    """[`GROUPS`] float64 of groups of tokens with one weight, as documents: of all, of those with labels, of sums.

    The least sum of a group's weights, if the others are its multiples (else nan); and different weights, in order.

    Args:
        noted: facts (`steps`). labels: [B, T] or none.
    """
    found = torch.full(GROUPS, math.nan, dtype=torch.float64, device=device)
    all_noted = filter(torch.is_tensor, [*noted["each"], *noted["in_sums"]])
    largest = [x.abs().amax().to(device) for x in all_noted if x.numel()]
    for x in noted["nearest"]:
        x = x.to(device).abs()
        x = x.masked_fill(x < SAME_WEIGHT[0] * torch.stack([x.amax(), *largest]).amax(), 0.0)  # rounding of zeros
        some_of = [x]
        if labels is not None and labels.numel() == x.numel():
            some_of.append(x * (labels.flatten() >= 0).to(device))
        for at, some in enumerate(some_of):
            of_one = some.sort().values
            begins = torch.cat([of_one[:1] >= 0, of_one[1:] != of_one[:-1]])
            found[at] = _group(torch.zeros_like(of_one).index_add(0, begins.cumsum(0) - 1, of_one), of_one)
    if noted["in_sums"]:
        each, sums = (torch.cat([x.to(device) for x in noted[name]]).abs() for name in ("in_sums", "sums"))
        found[2] = _group(sums, each)
    return found.flatten()


def _group(sums: Tensor, each: Tensor) -> Tensor:
    least = sums.masked_fill(sums == 0, math.inf).amin()
    are_multiples = _are_whole(sums / least) & least.isfinite()
    numbers = torch.full(GROUPS[1:], math.nan, dtype=torch.float64, device=each.device)
    different = _different_of(each)[:MOST_WEIGHTS]
    numbers[0], numbers[1 : 1 + len(different)] = least.where(are_multiples, math.nan), different
    return numbers


def _are_whole(x: Tensor) -> Tensor:
    return ((x - x.round()).abs() < MULTIPLE).all()


def divide_by_groups(table: Tensor) -> bool:
    """Returns True if ranks divided the weights of each document by their own number of its tokens.

    Then all documents have one sum on all ranks, and every rank has weights that no other rank has.

    Args:
        table: [R, `GROUPS`] in float32 of all ranks.
    """
    for groups in table.unflatten(1, GROUPS).unbind(1):
        groups = groups[~groups[:, 1].isnan()]
        least, each = groups[:, 0], groups[:, 1:]
        several = len(groups) > 1 and bool((~each[:, 1].isnan()).any())
        if not several or not least.isfinite().all() or not _are_whole(least / least.amin()):
            continue
        x, order = each.flatten().sort()
        ranks = order // MOST_WEIGHTS
        is_near = (x.diff() <= SAME_WEIGHT[0] * x[1:]) & (ranks.diff() != 0)
        of_one = ~(x.isnan() | functional.pad(is_near, (1, 0)) | functional.pad(is_near, (0, 1)))
        if len(ranks[of_one].unique()) == len(groups):
            return True
    return False


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
    """Returns True if the values of any column of [R, n] differ. The mean of a rank without labels has weight inf."""
    least, most = x.amin(0), x.amax(0)
    apart = most - least  # nan if all are infinite
    return bool((apart.isinf() | (apart > relative * torch.maximum(most.abs(), least.abs()))).any())


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
