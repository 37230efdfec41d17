"""Communication hooks of DDP (`register_comm_hook`): tries once that a program's own gives the mean over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ... import errors
from ...comm.ring import Ring
from ..context.introspect import name_of

FARTHEST = 0.25
"""How far from 1 a factor may be that rounding in the hook explains: it may send 8 bits."""
OTHER_FACTOR = (
    "its communication hook (register_comm_hook) gives {:.3g} times the mean of the ranks' gradients, and a ring needs "
    "the mean: divide by the number of processes in the hook"
)


class HookTrial:
    """The gradient of one weight of a wrapper before its hook, to compare with that after it."""

    def __init__(self, wrapper: Any, weights: Iterable[Tensor]) -> None:
        self.weight: Any = min(weights, key=Tensor.numel)
        self.model, self.ring = name_of(wrapper.module), Ring.of(wrapper.process_group)
        self.before: Tensor | None = None
        self.is_over = False
        self._handle = self.weight.register_post_accumulate_grad_hook(self.note)

    def note(self, weight: Tensor) -> None:
        """Copies the gradient of this rank, before the hook gets it."""
        self.before = None if weight.grad is None else weight.grad.detach().clone()

    def compare_after(self) -> None:
        """Compares at the end of this backward, after DDP, whose end comes later than ours."""
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._compare)

    @torch.no_grad()
    def _compare(self) -> None:
        if self.is_over:
            return
        now = self.weight.grad
        before = torch.zeros_like(self.weight) if self.before is None else self.before
        mean = self.ring.mean(before.float())
        after = torch.full_like(mean, torch.nan) if now is None else now.float()  # an optimizer stepped inside
        factor = self.ring.mean((after * mean).sum() / mean.square().sum())  # ranks may have other gradients
        if not factor.isfinite():  # no gradient: the next backward may have one
            return
        self.is_over = True
        self._handle.remove()
        if abs(float(factor) - 1) > FARTHEST:
            raise errors.UnsupportedModel(self.model, [OTHER_FACTOR.format(float(factor))])
