"""Watches what DDP averages, and refuses steps by gradients of a rank's own tokens.

DDP averages the weights that trained when it wrapped their model; what it leaves out is averaged by `backward_end`. In
its no_sync DDP averages none, for a program that does so later. An optimizer that steps inside the backward comes
before any average."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ... import errors
from ...comm.ring import Ring
from ..context.batch_context import BatchContext
from ..context.introspect import is_ddp, name_of, unwrapped
from ..context.model_record import Visits, latest_record
from ..patching import optimizer_steps
from ..patching.modules import attach
from .backward_end import BackwardEnd, Wrapped

_SEEN: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
"""The identities of the weights that trained in any batch of each DDP wrapper, which keeps them alive."""

_WRAPPED: weakref.WeakKeyDictionary[Any, Wrapped] = weakref.WeakKeyDictionary()
"""The state of each DDP wrapper."""

_LOCAL: weakref.WeakKeyDictionary[Any, tuple[Ring, str]] = weakref.WeakKeyDictionary()
"""The ring of each DDP wrapper whose last forward was in its ``no_sync``, or past it, and what to do about that; until
its weights' optimizer steps."""


def note_trained(model: nn.Module, context: BatchContext) -> None:
    """Notes the weights that a model under DDP trains in a batch: DDP averages those that trained when it wrapped it.

    DDP says how many weights it averages, not which: those that trained until now, and no others, if they are as many.
    """
    wrapper: Any = next(filter(is_ddp, unwrapped(model)), None)
    if wrapper is None or context.ring.size == 1 or not model.training or not torch.is_grad_enabled():
        return
    if wrapper.require_backward_grad_sync:
        _LOCAL.pop(wrapper, None)
    else:
        _LOCAL[wrapper] = context.ring, _NO_SYNC
    is_new = wrapper not in _WRAPPED
    wrapped = _WRAPPED.setdefault(wrapper, Wrapped(wrapper))
    if is_new:
        attach(wrapper, "backward_end", wrapped.before_forward, wrapped.after_forward)
    context.state(BackwardEnd).calls[id(wrapper)] = wrapped.end
    visit = context.state(Visits).get(latest_record(model))
    if visit is not None:
        trained = frozenset(map(id, visit.trained))
        seen = _SEEN[wrapper] = _SEEN.get(wrapper, frozenset()) | trained
        wrapped.trained[trained] = visit.trained
        wrapped.has_late = len(seen) > wrapper._get_ddp_logging_data()["num_parameter_tensors"]
    if is_new and context.log.ran:  # it is running, past its hooks
        wrapped.before_forward()
    optimizer_steps.call_before_each_step(_refuse_unaveraged)


def note_call(wrapper: Any, ring: Ring) -> None:
    """Notes a call of the model inside a DDP wrapper: past the wrapper no gradient is averaged."""
    if torch.is_grad_enabled() and wrapper.training and type(wrapper)._active_ddp_module is not wrapper:
        _LOCAL[wrapper] = ring, _PAST


def _refuse_unaveraged(optimizer: Optimizer) -> None:
    """Refuses a step while DDP has not averaged the gradients of its weights, unless the program has.

    Raises:
        UnsupportedModel: with the name of the first weight that DDP awaits, if it is known.
        RanksDiffer: DDP was told not to average, and gradients differ.
    """
    for wrapper, wrapped in list(_WRAPPED.items()):
        if wrapped.awaits and wrapped.has_late:  # a backward that nothing ended (reentrant checkpoints below a loss)
            _LOCAL.setdefault(wrapper, (Ring.of(wrapper.process_group), _LATE))
    for wrapper, (ring, todo) in list(_LOCAL.items()):
        names = {id(x): name.removeprefix("module.") for name, x in wrapper.named_parameters()}
        mine = [x for group in optimizer.param_groups for x in group["params"] if id(x) in names]
        if mine:
            del _LOCAL[wrapper]
            norms = {f"gradient of {names[id(x)]} (its norm)": None if x.grad is None else x.grad.norm() for x in mine}
            ring.agree(norms, ring.small_device(mine[0].device), todo)
    for wrapper, seen in list(_SEEN.items()):
        try:
            wrapper.reducer._check_reducer_finalized()
        except RuntimeError:
            weights = dict(wrapper.named_parameters())
            theirs = set(map(id, weights.values()))
            mine = [x for group in optimizer.param_groups for x in group["params"] if id(x) in theirs]
            # torch's own optimizers inside the backward step once the gradients of their weights are averaged.
            if not mine or hasattr(mine[0], "_in_backward_optimizers"):
                continue
            lacking = (n for n, x in weights.items() if id(x) in seen and (x.grad is None or not x.requires_grad))
            name = next(lacking, "").removeprefix("module.")
            example = f" ({name}, ...)" if name else ""
            raise errors.UnsupportedModel(
                name_of(wrapper),
                [
                    f"its optimizer steps before DDP averaged all gradients{example}: let no optimizer step inside the "
                    "backward; if this loss does not use some weights, set ddp_find_unused_parameters=True"
                ],
            ) from None


_NO_SYNC = (
    "The last backward before the optimizer's step was in DDP's no_sync, which does not average gradients; Trainer "
    "does so if gradient_accumulation_steps changes while it trains. Leave no_sync for that backward, or average by "
    "hand."
)


_LATE = (
    "Weights began to train after DDP wrapped the model, so it does not average their gradients: let them require "
    "gradients before, with find_unused_parameters=True, or wrap the model again."
)

_PAST = (
    "The model inside DDP was called, so DDP did not average its gradients, and the loss is not the model's: call the "
    "model that DDP wraps, or compute_loss gets."
)


def forget() -> None:
    """Forgets all wrappers."""
    _SEEN.clear()
    _WRAPPED.clear()
    _LOCAL.clear()
