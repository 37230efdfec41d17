"""Weights of tokens in a cross entropy, read from the gradient of their logits.

A compiled loss, and one in an autograd function of a program's own, cannot be followed step by step, and a gradient
that a program makes by hand has no steps. But the gradient of a cross entropy shows its weight: it is
weight * (softmax(logits) - onehot(label)).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

TOKENS = 16
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
        places = order.topk(min(TOKENS, len(rows))).indices
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
