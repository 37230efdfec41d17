"""The end of each backward of a batch: a program may read gradients then, so what nothing else averages is averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ...comm.ring import Ring


@dataclass(frozen=True)
class Averages:
    """The averaging of some weights' gradients.

    Args:
        weights: returns them. end: called with a backward's number at its end. passes: called in a backward that sets
            no gradients.
    """

    weights: Callable[[], Iterable[Any]]
    end: Callable[[int], None]
    passes: Callable[[], None] = lambda: None


class BackwardEnd:
    """The averaging at the end of each backward of a batch's loss.

    Attributes:
        parts: by the identities of what each averages.
    """

    def __init__(self) -> None:
        self.parts: dict[object, Averages] = {}
        self._task: int | None = None

    def expect(self) -> None:
        """Averages once at the end of the backward that runs now."""
        task = torch._C._current_graph_task_id()
        if self.parts and task != self._task:
            self._task = task
            if not any(_sets_gradients(part.weights()) for part in self.parts.values()):
                for part in self.parts.values():
                    part.passes()
                return
            _call_at_end(lambda: _call_at_end(lambda: self._call(task)))  # DDP's own end comes in between

    def _call(self, task: int) -> None:
        for part in list(self.parts.values()):
            part.end(task)


def _sets_gradients(weights: Iterable[Any]) -> bool:
    """Returns False if the backward that runs leaves the weights' ``.grad`` as it is, as `torch.autograd.grad` does."""
    if torch.autograd._is_checkpoint_valid():  # neither that nor backward(inputs=...)
        return True
    nodes = [get_gradient_edge(x).node for x in weights if x.requires_grad and x.is_leaf]
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # torch.autograd.grad of a weight
        return False


def _call_at_end(function: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def average(weights: Sequence[Any], ring: Ring) -> None:
    """Averages the gradients of ``weights``. What has none on any rank keeps none: an optimizer would decay it."""
    part: list[Any] = []
    numbers = 0
    for x in weights:
        if part and numbers + x.numel() > TOGETHER:
            _average(part, ring)
            part, numbers = [], 0
        part.append(x)
        numbers += x.numel()
    _average(part, ring)


TOGETHER = 1 << 26
"""The most numbers whose averages are in memory beside the gradients, unless one gradient has more."""


def _average(weights: list[Any], ring: Ring) -> None:
    if not weights:
        return
    # A rank without a gradient (of an unused expert) still takes part in the sum.
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in weights]
    lacking = [index for index, x in enumerate(weights) if x.grad is None]
    had = torch.tensor([float(x.grad is not None) for x in weights], device=weights[0].device)
    *averaged, had = ring.means([*gradients, had])
    everywhere = had.tolist() if lacking else []  # the host waits for all of it at once
    nowhere = {index for index in lacking if not everywhere[index]}
    for index, (weight, mean) in enumerate(zip(weights, averaged, strict=True)):
        if weight.grad is not None:
            weight.grad.detach().copy_(mean)  # DDP may hold its memory
        elif index not in nowhere:
            weight.grad = mean
