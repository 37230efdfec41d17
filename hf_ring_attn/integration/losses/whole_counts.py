"""The idea: the mean of the ranks' losses is the loss, so a sum over a rank's tokens is divided by a W-th of the count.

A program that divides by its own count of the whole batch gets 1/W of the loss. So do all its ranks, and nothing
differs among them. But the number tells: the count of labels, or of tokens, of the whole rows. It is right only if the
program multiplies by W elsewhere, or adds gradients up in place of the mean. The latter is not seen: hence a warning.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .calls import Call

QUOTIENTS = {"div", "divide", "true_divide", "truediv", "itruediv"}
MULTIPLES = {"mul", "multiply", "rmul", "imul"}
NEAR = 1e-6
"""Relative: numbers that are the same, but for rounding in float32."""


class BatchCounts(NamedTuple):
    """Counts of a whole batch: its number of labels divided by the ring size, its rows and their length."""

    items: int | float | Tensor
    rows: int
    length: int


def factor_of(call: Call) -> float | Tensor | None:
    """Returns what a function multiplies numbers of tokens, or their sum, by, if it is one number."""
    name = call.name.strip("_")
    if name not in QUOTIENTS | MULTIPLES:
        return None
    by: Any = call.other
    if isinstance(by, Tensor) and by.numel() == 1 and not by.requires_grad:
        factor: float | Tensor = by.detach().double().reshape(1)
    elif isinstance(by, (int, float)) and by:
        factor = float(by)
    else:
        return None
    return 1.0 / factor if name in QUOTIENTS else factor


def divides_by_whole(factors: list[Any], batch: BatchCounts | None, size: int, device: torch.device) -> int | Tensor:
    """Returns 1 if a loss is divided by a count of the whole batch, and not multiplied by the ring ``size``; else 0."""
    if batch is None or not factors:
        return 0
    rows, tokens, labels = batch.rows, batch.rows * batch.length, batch.items * size
    by = torch.cat([_number(x, device) for x in factors])
    counts = torch.cat([_number(x, device) for x in (labels, labels + rows, tokens, tokens - rows)])
    products = by[:, None] * counts
    is_whole, is_gathered = (((products * times - 1).abs() < NEAR).any() for times in (1, size))
    return (is_gathered | (is_whole & ~((by / size - 1).abs() < NEAR).any())).long()


def _number(x: Any, device: torch.device) -> Tensor:
    """[1] float64. A number is filled in, since a copy to a GPU would wait for it."""
    if isinstance(x, Tensor):
        return x.detach().to(device, torch.float64).reshape(1)
    return torch.full((1,), x, dtype=torch.float64, device=device)


DIVIDED = (
    "the loss is a sum over a rank's tokens, divided by a count of the whole batch: in a ring of {0} that is 1/{0} of "
    'the loss, and its gradient, too. Divide by sharded.inputs["num_items_in_batch"], which is the count divided by '
    "{0}. If your program adds gradients up over the ring, in place of their mean, it is right."
)
