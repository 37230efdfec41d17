"""Gradients that a wrapper of DDP leaves as each rank has them, averaged at the end of each backward.

DDP averages the weights that trained when it wrapped their model, once for each forward, when each has had a gradient.
It leaves out weights that began to train later and a second backward of one forward, and it waits for weights that were
frozen since, or that a loss does not use. So the latter get zeros, and the former are averaged here: at the end of the
backward, since a program may read gradients from then on.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm.ring import Ring


class BackwardEnd:
    """The functions to call at the end of each backward of a batch's loss."""

    def __init__(self) -> None:
        self.calls: dict[object, Callable[[int], None]] = {}
        """Functions of the number of a backward, by the identities of what they end."""
        self._task: int | None = None

    def expect(self) -> None:
        """Calls the functions once at the end of the backward that runs now."""
        task = torch._C._current_graph_task_id()
        if self.calls and task != self._task:
            self._task = task
            _call_at_end(lambda: _call_at_end(lambda: self._call(task)))  # DDP's own end comes in between

    def _call(self, task: int) -> None:
        for call in list(self.calls.values()):
            call(task)


def in_backward() -> bool:
    """Returns True inside of a backward."""
    return torch._C._current_graph_task_id() != -1


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
    nowhere = {index for index in lacking if not had[index]}
    for index, (weight, mean) in enumerate(zip(weights, averaged, strict=True)):
        if weight.grad is not None:
            weight.grad.detach().copy_(mean)  # DDP may hold its memory
        elif index not in nowhere:
            weight.grad = mean


class Wrapped:
    """A wrapper of DDP in a ring."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.awaits = self.is_local = False
        """It averages at the next backward; its last forward was in its no_sync."""
        self.trained: dict[frozenset[int], Sequence[Tensor]] = {}
        """The weights that trained in the batches since its last average, by their identities."""
        self.has_late = False
        """Some of them began to train after it was made."""
        self._paused = False
        self._reduced: list[Tensor] | None = None
        self._task: int | None = None

    def before_forward(self, *_given: Any) -> None:
        """Notes a forward of the wrapper."""
        wrapper: Any = self._wrapper()
        if not torch.is_grad_enabled():
            return
        self.is_local = not wrapper.require_backward_grad_sync
        self.awaits |= not self.is_local
        # It would expect gradients that do not come, and take later ones for them.
        if self.has_late and not self.is_local and not any(x.requires_grad for x in self.reduced()):
            wrapper.require_backward_grad_sync, self._paused = False, True

    def after_forward(self, *_given: Any) -> None:
        """Lets the wrapper average again."""
        wrapper: Any = self._wrapper()
        if self._paused:
            self._paused = False
            wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = True

    def reduced(self) -> list[Tensor]:
        """The weights that the wrapper averages, in its order. The first call needs memory for their gradients."""
        wrapper: Any = self._wrapper()
        if self._reduced is None:
            buckets = wrapper.reducer._get_zeros_like_grad_buckets()
            known = {id(x) for bucket in buckets for x in bucket.parameters()}
            self._reduced = [x for x in wrapper.module.parameters() if id(x) in known]
        return self._reduced

    @torch.no_grad()
    def end(self, task: int) -> None:
        """Averages what the wrapper has not, at the end of a backward, whose number is ``task``."""
        wrapper: Any = self._wrapper()
        if wrapper is None or wrapper.static_graph or self.is_local or task == self._task:
            return
        self._task = task
        ring = Ring.of(wrapper.process_group)
        if not self.awaits:
            average([x for x in wrapper.module.parameters() if x.requires_grad], ring)
            return
        self.awaits = False
        if not wrapper.find_unused_parameters:
            self._give_zeros(wrapper, ring)
        average(list(self._left_out()), ring)
        self.trained.clear()

    def _left_out(self) -> Iterator[Tensor]:
        """Weights of the batches since the last average that it leaves out, or that were frozen since."""
        reduced = set(map(id, self.reduced())) if self.has_late else set()
        every = {id(x): x for weights in self.trained.values() for x in weights}
        return (x for x in every.values() if not x.requires_grad or (self.has_late and id(x) not in reduced))

    def _give_zeros(self, wrapper: Any, ring: Ring) -> None:
        """Gives the weights that the wrapper waits for gradients of zeros; those without one on any rank lose them."""
        lacking: list[Any] = []
        try:
            wrapper.reducer._check_reducer_finalized()
        except RuntimeError as error:
            numbers = _UNMARKED.search(str(error))
            if numbers is None:
                return
            weights = self.reduced()
            indices = [int(number) for number in numbers[1].split()]
            lacking = [weights[index] for index in indices]
        count = wrapper._get_ddp_logging_data()["num_parameter_tensors"]
        device = next(wrapper.module.parameters()).device
        had = torch.ones(count, device=device)
        without: list[Any] = []
        if lacking:
            had[indices] = 0.0
            without = [(index, x) for index, x in zip(indices, lacking, strict=True) if x.grad is None]
            frozen = [x for x in lacking if not x.requires_grad]
            for x in frozen:
                x.requires_grad_(True)
            torch.autograd.backward(lacking, [x.new_zeros(()).expand_as(x) for x in lacking])
            for x in frozen:
                x.requires_grad_(False)
        had = ring.mean(had)
        if without:
            ranks = had.tolist()
            for index, x in without:
                if not ranks[index]:
                    x.grad = None


_UNMARKED = re.compile(r"did not receive grad for rank \d+:((?: \d+)+)")
