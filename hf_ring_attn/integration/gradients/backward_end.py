"""The end of each backward of a batch: a program may read gradients then, so what nothing else averages is averaged.

So are those that `torch.autograd.grad` returns for weights: each rank's are of its tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ... import errors
from ...comm.ring import Ring
from ..context.introspect import local_of


@dataclass(frozen=True)
class Averages:
    """The averaging of some weights' gradients.

    Args:
        weights: returns them. end: called with a backward's number at its end. passes: called in a backward that sets
            no gradients. ring: the ranks that have parts of them.
    """

    weights: Callable[[], Iterable[Any]]
    end: Callable[[int], None]
    ring: Ring
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
                    _average_captured(part.weights(), part.ring)
                return
            call_at_end(lambda: call_at_end(lambda: self._call(task)))  # DDP's own end comes in between

    def _call(self, task: int) -> None:
        for part in list(self.parts.values()):
            part.end(task)


def _sets_gradients(weights: Iterable[Any]) -> bool:
    """Returns False if the backward that runs leaves the weights' ``.grad`` as it is, as `torch.autograd.grad` does."""
    if torch.autograd._is_checkpoint_valid():  # neither that nor backward(inputs=...)
        return True
    return any(_is_executed(x) for x in weights if x.requires_grad and x.is_leaf)


def _is_executed(weight: Any) -> bool | None:
    """Returns True if the backward that runs sets a weight's gradient; None: it returns it (`torch.autograd.grad`)."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(weight).node)
    except RuntimeError:
        return None


def _average_captured(weights: Iterable[Any], ring: Ring) -> None:
    """Averages the gradients that `torch.autograd.grad`, which runs now, will return for some of ``weights``.

    A derivative of the average is right, too, as that of a rank's part: the mean over ranks comes in its own backward.

    Raises:
        RanksDiffer: at its end, on every rank, if the loss uses a weight on some ranks alone.
    """
    asked = [x for x in weights if x.requires_grad and x.is_leaf and _is_executed(x) is None]
    if not asked:
        return
    found: dict[int, Tensor] = {}

    def take(index: int, gradient: Tensor) -> Tensor:
        found[index] = gradient.clone()
        return found[index]

    handles = [x.register_hook(functools.partial(take, index)) for index, x in enumerate(asked)]

    @torch.no_grad()
    def average_all() -> None:
        for handle in handles:
            handle.remove()
        own = [found[index].detach() if index in found else torch.zeros_like(x) for index, x in enumerate(asked)]
        mine = list(map(local_of, own))
        had = torch.tensor([float(index in found) for index in range(len(asked))], device=asked[0].device)
        *averaged, share = ring.means([*mine, had])
        if bool((share != share.round()).any()):
            raise errors.RanksDiffer("weights that torch.autograd.grad found in the loss", share.tolist(), SOME)
        for x, mean in zip(mine, averaged, strict=True):
            x.copy_(mean)

    call_at_end(average_all)


SOME = "A loss must use the same weights on every rank: choose them by whole rows, not by a rank's tokens."


def call_at_end(function: Callable[[], None]) -> None:
    """Calls ``function`` at the end of the backward that runs."""
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
    gradients = [local_of(torch.zeros_like(x) if x.grad is None else x.grad) for x in weights]
    lacking = [index for index, x in enumerate(weights) if x.grad is None]
    had = torch.tensor([float(x.grad is not None) for x in weights], device=weights[0].device)
    *averaged, had = ring.means([*gradients, had])
    everywhere = had.tolist() if lacking else []  # the host waits for all of it at once
    nowhere = {index for index in lacking if not everywhere[index]}
    for index, (weight, mean) in enumerate(zip(weights, averaged, strict=True)):
        if weight.grad is not None:
            local_of(weight.grad).detach().copy_(mean)  # DDP may hold its memory
        elif index not in nowhere:
            weight.grad = torch.zeros_like(weight)
            local_of(weight.grad).copy_(mean)
