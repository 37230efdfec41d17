"""DDP in a ring: averages the gradients that it leaves as each rank has them, and refuses steps by such gradients.

DDP averages the weights that trained when it wrapped their model, once for each forward, when each has had a gradient.
It leaves out weights that began to train later and a second backward of one forward, and it waits for weights that were
frozen since, or that a loss does not use. So the latter get zeros, and the former are averaged at the end of the
backward. In its no_sync it averages none, for a program that does so later. An optimizer that steps inside the backward
comes before any average.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ... import errors
from ...comm.ring import Ring
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.introspect import DDP, is_ddp, modules_of, name_of, unwrapped
from ..context.model_record import Visits, latest_record
from ..patching import optimizer_steps
from ..patching.changes import at_uninstall
from ..patching.modules import attach
from .backward_end import Averages, BackwardEnd, average
from .comm_hooks import HookTrial


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
        self.seen = frozenset[int]()
        """The identities of the weights that trained in any batch; it keeps these alive."""
        self.left: tuple[Ring, str] | None = None
        """Its ring, and what to do, if its last forward was in its no_sync or past it; until its optimizer steps."""
        self.trial: HookTrial | None = None
        self._paused = self._passed = False
        self._reduced: list[Tensor] | None = None
        self._task: int | None = None

    def before_forward(self, *_given: Any) -> None:
        """Notes a forward of the wrapper."""
        wrapper: Any = self._wrapper()
        if not torch.is_grad_enabled():
            return
        self.is_local = not wrapper.require_backward_grad_sync
        self.awaits |= not self.is_local
        context = batch_context.current()
        if not self.is_local:
            self.left = None
        elif context is not None and context.ring.size > 1:
            self.left = context.ring, _NO_SYNC
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

    def passes(self) -> None:
        """Notes a backward that sets no gradients: with a static graph the wrapper takes it for the one it awaits."""
        wrapper: Any = self._wrapper()
        self._passed |= wrapper is not None and wrapper.static_graph

    @torch.no_grad()
    def end(self, task: int) -> None:
        """Averages what the wrapper has not, at the end of a backward, whose number is ``task``."""
        wrapper: Any = self._wrapper()
        if wrapper is None or self.is_local or task == self._task:
            return
        self._task = task
        if self.trial is not None and self.awaits:
            self.trial.compare_after()
        ring = Ring.of(wrapper.process_group)
        if not self.awaits or self._passed:
            self.awaits = self._passed = False
            average([x for x in wrapper.module.parameters() if x.requires_grad], ring)
            return
        self.awaits = False
        if not (wrapper.find_unused_parameters or wrapper.static_graph):
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


_WRAPPED: weakref.WeakKeyDictionary[Any, Wrapped] = weakref.WeakKeyDictionary()
"""The state of each DDP wrapper."""
at_uninstall(_WRAPPED.clear)


def _state_of(wrapper: Any) -> Wrapped:
    if wrapper not in _WRAPPED:
        wrapped = _WRAPPED[wrapper] = Wrapped(wrapper)
        attach(wrapper, "backward_end", wrapped.before_forward, wrapped.after_forward)
    return _WRAPPED[wrapper]


def wrappers_of(model: nn.Module) -> list[Any]:
    """The wrappers of DDP around a model; else those in it, which a program's own module may hold."""
    around, record = list(filter(is_ddp, unwrapped(model))), latest_record(model)
    return around if around or DDP not in record.classes else list(filter(is_ddp, record.modules()))


def wrapper_of(part: nn.Module, model: nn.Module) -> Any:
    """The wrapper of DDP around a part of a model, which may be the model itself; None if there is none."""
    first, *others = wrappers_of(model) or [None]
    if not others and (first is None or first in unwrapped(model)):
        return first
    return next((one for one in (first, *others) if any(module is part for module in modules_of(one))), None)


def note_trained(model: nn.Module, context: BatchContext) -> None:
    """Notes the weights that a model under DDP trains in a batch: DDP averages those that trained when it wrapped it.

    DDP says how many weights it averages, not which: those that trained until now, and no others, if they are as many.
    """
    if context.ring.size == 1 or not torch.is_grad_enabled():
        return
    visit, around = context.state(Visits).get(latest_record(model)), set(map(id, unwrapped(model)))
    for wrapper in wrappers_of(model):
        if wrapper._join_config.enable and context.ring.size < wrapper.process_group.size():
            raise errors.UnsupportedArgument("DDP", "join_uneven_inputs (torch's Join)", _JOIN, "was called inside of")
        is_new, wrapped = wrapper not in _WRAPPED, _state_of(wrapper)
        if is_new and context.log.ran and id(wrapper) in around:  # it is running, past its hooks
            wrapped.before_forward()
        averages = Averages(wrapper.module.parameters, wrapped.end, context.ring, wrapped.passes)
        context.state(BackwardEnd).parts[id(wrapper)] = averages
        if visit is not None:
            weights = visit.trained
            if id(wrapper) not in around:  # it holds a part of the model
                own = set(map(id, wrapper.module.parameters()))
                weights = [x for x in weights if id(x) in own]
            trained = frozenset(map(id, weights))
            wrapped.seen |= trained
            wrapped.trained[trained] = weights
            if wrapper._comm_hooks and wrapped.trial is None and weights:
                wrapped.trial = HookTrial(wrapper, weights)
            wrapped.has_late = len(wrapped.seen) > wrapper._get_ddp_logging_data()["num_parameter_tensors"]
        optimizer_steps.call_before_each_step(_refuse_unaveraged)


def note_call(wrapper: Any, ring: Ring) -> None:
    """Notes a call of the model inside a DDP wrapper: past the wrapper no gradient is averaged."""
    if torch.is_grad_enabled() and type(wrapper)._active_ddp_module is not wrapper:
        _state_of(wrapper).left = ring, _PAST


def _refuse_unaveraged(optimizer: Optimizer) -> None:
    """Refuses a step while DDP has not averaged the gradients of its weights, unless the program has.

    Raises:
        UnsupportedModel: with the name of the first weight that DDP awaits, if it is known.
        RanksDiffer: DDP was told not to average, and gradients differ.
    """
    if any(_steps_inside(wrapper, optimizer) for wrapper in list(_WRAPPED)):
        return
    every = list(_WRAPPED.items())
    _compare_left_alone(every, optimizer)
    for wrapper, wrapped in every:
        try:
            wrapper.reducer._check_reducer_finalized()
        except RuntimeError:
            if error := _unfinished(wrapper, wrapped, optimizer):
                raise error from None


def _compare_left_alone(every: list[tuple[Any, Wrapped]], optimizer: Optimizer) -> None:
    """Compares among ranks the gradients that an optimizer is about to use, and that DDP has not averaged."""
    for wrapper, wrapped in every:
        if not (wrapped.left or wrapped.awaits):
            continue
        names = {id(x): name.removeprefix("module.") for name, x in wrapper.named_parameters()}
        mine = [x for x in optimizer_steps.weights_of(optimizer) if id(x) in names]
        if mine:  # a step of other weights sends nothing: one rank may make it alone, of a probe
            unseen = _LATE if wrapped.has_late else _UNSEEN  # a backward whose end was not seen, or none
            (ring, todo), wrapped.left = wrapped.left or (Ring.of(wrapper.process_group), unseen), None
            norms = {f"gradient of {names[id(x)]} (its norm)": None if x.grad is None else x.grad.norm() for x in mine}
            ring.agree(norms, ring.small_device(mine[0].device), todo, doing="compared gradients that DDP left alone")


def _unfinished(wrapper: Any, wrapped: Wrapped, optimizer: Optimizer) -> errors.UnsupportedModel | None:
    """The refusal of an optimizer that steps weights of DDP while it awaits gradients; None: it steps others."""
    weights = dict(wrapper.named_parameters())
    theirs = set(map(id, weights.values()))
    if not wrapped.seen or not any(id(x) in theirs for x in optimizer_steps.weights_of(optimizer)):
        return None
    lacking = (n for n, x in weights.items() if id(x) in wrapped.seen and (x.grad is None or not x.requires_grad))
    name = next(lacking, "").removeprefix("module.")
    return errors.UnsupportedModel(name_of(wrapper), [_UNFINISHED.format(f" ({name}, ...)" if name else "")])


_UNFINISHED = (
    "its optimizer steps before DDP averaged all gradients{}: let no optimizer step inside the backward; if this loss "
    "does not use some weights, set ddp_find_unused_parameters=True"
)


def _steps_inside(wrapper: Any, optimizer: Optimizer) -> bool:
    """Returns True if DDP itself steps an optimizer, once it has averaged (`_apply_optimizer_in_backward`).

    Its reducer is locked then: a question to it would never return.
    """
    # DDP asks hooks for __qualname__, and a program's may have no __name__.
    if all(getattr(hook, "__name__", "") != "apply_optim_in_backward_hook" for hook, _ in wrapper._comm_hooks):
        return False
    return any(optimizer in getattr(x, "_in_backward_optimizers", ()) for x in wrapper.parameters())


_JOIN = (
    "several rings average gradients together, so they would wait for one that has no more batches. Give all rings "
    "equally many batches: even_batches=True, which is accelerate's default, or drop the last ones"
)
_NO_SYNC = (
    "The last backward before the optimizer's step was in DDP's no_sync, which does not average gradients, as in "
    "accelerate's LocalSGD; Trainer does so if gradient_accumulation_steps changes while it trains. Leave no_sync for "
    "that backward, or average by hand."
)


_LATE = (
    "Weights began to train after DDP wrapped the model, so it does not average their gradients: let them require "
    "gradients before, with find_unused_parameters=True, or wrap the model again."
)

_UNSEEN = (
    "DDP did not average them: it averages in a backward of what its forward returned, not in torch.autograd.grad. "
    "Call backward, or average by hand."
)

_PAST = (
    "The model inside DDP was called, so DDP did not average its gradients, and the loss is not the model's: call the "
    "model that DDP wraps, or compute_loss gets."
)
