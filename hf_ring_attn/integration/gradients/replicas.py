"""Replicas of a model in a plain loop: averages their gradients, and detects that a program left it out.

DDP and FSDP average gradients over the ranks of a ring. Those of a bare model are averaged at the end of each backward
that is seen, else by `Sharded.reduce_gradients`, whose absence shows at the next batch.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import errors
from ...comm.ring import Ring
from ..context.batch_context import BatchContext
from ..context.introspect import is_ddp, is_dtensor, is_unit, local_of, may_train, split_across, unwrapped
from ..context.model_record import Visits, latest_record
from ..context.references import alive
from ..log import warn
from ..patching.changes import at_uninstall
from . import fsdp, fsdp_units
from .backward_end import Averages, BackwardEnd, average

AVERAGING = {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine", "DTensor"}
PARTS = {"DistributedDataParallel", "FSDPModule", "DTensor"}
"""Those that may leave out some of a model's weights, where they wrap its parts."""

_VERSION: Callable[[Tensor], int] = attrgetter("_version")


class ReducedGradients(WeakIdKeyDictionary):
    """The parameters whose gradients `Sharded.reduce_gradients` averaged in one batch, each with None."""


class _Trained(NamedTuple):
    """A module that trains in a batch, which it does not keep alive; ``written``: the sum of the weights' versions."""

    name: str
    weights: list[weakref.ref[Tensor]]
    batch: weakref.ref[BatchContext]
    ring_size: int
    written: int


_last: list[_Trained] = []
"""Modules that train in the last batch."""


def bare_of(trained: list[Any], model: nn.Module, ring: Ring) -> list[Any]:
    """The weights among ``trained`` whose gradients no wrapper in or around their model combines over the ring."""
    wrappers = [module for module in unwrapped(model) if not _leaves_ring(module, ring)]
    around = {cls.__name__ for module in wrappers for cls in type(module).__mro__}
    inside = latest_record(model).classes
    if AVERAGING.isdisjoint(around | inside):
        return trained
    if not (AVERAGING - PARTS).isdisjoint(around) or PARTS.isdisjoint(inside):
        return []
    trained = _whole_in_ring(trained, ring)
    if not trained:  # all are sharded, as before each forward of a model that FSDP2 wraps
        return []
    combined: set[int] = set()
    for module in latest_record(model).modules():
        weights: Iterable[Any] = fsdp_units.weights_of(module) if is_unit(module) else ()
        averages = is_ddp(module) and not _leaves_ring(module, ring)
        combined.update(map(id, module.parameters() if averages else weights))
    return [x for x in trained if id(x) not in combined]


def _whole_in_ring(weights: list[Any], ring: Ring) -> list[Any]:
    """The weights of which no two ranks of a ring hold parts: bare ones, and those that are split across rings."""
    across = split_across(weights, ring.ranks())
    return [x for x in weights if not is_dtensor(x) or id(x) in across]


def _leaves_ring(module: nn.Module, ring: Ring) -> bool:
    """Returns True for a wrapper of DDP over a group that lacks ranks of the ring, as one over replicas alone."""
    group = getattr(module, "process_group", None) if is_ddp(module) else None
    return group is not None and not ring.ranks() <= Ring.of(group).ranks()


def note_trained(model: nn.Module, context: BatchContext) -> None:
    """Notes a bare model that trains in a ring, or the weights that its wrappers leave out."""
    if context.ring.size > 1 and may_train(model):
        record = latest_record(model)
        visit = context.state(Visits).get(record)
        every: list[Any] = [x for x in record.weights() if x.requires_grad] if visit is None else visit.trained
        trained = bare_of(every, model, context.ring)
        if not trained:
            return
        _note(type(model).__name__, trained, context)
        smallest = record.state(_Smallest)
        if not smallest:
            # The last of the smallest: LoRA's first factor has no gradient at first, the second one has.
            smallest.append(min(reversed(range(len(trained))), key=lambda index: trained[index].numel()))
        weight = trained[smallest[0]]
        if weight.is_leaf and weight not in _GRADIENTS:  # torch.func.functional_call has others
            _GRADIENTS[weight] = _Gradient(weight)


# ---- averaging by hand -----------------------------------------------------------------------------------------------


class _Smallest(list[int]):
    """The index of a model's smallest trained weight: one item, once it is known."""


class _Versions(WeakIdKeyDictionary):
    """The version counter of each trained weight at the start of its first forward since its average."""


class _Gradient:
    """A copy of a weight's gradient after backward, until ranks average it."""

    def __init__(self, weight: Tensor) -> None:
        self.left: tuple[Tensor, int, Tensor] | None = None
        self.handle = weight.register_post_accumulate_grad_hook(self.note)

    def note(self, weight: Tensor) -> None:
        if weight.grad is not None:
            self.left = weight.grad, weight.grad._version, weight.grad.detach().clone()

    def factor(self, weight: Tensor) -> Tensor | None:
        """The factor by which the gradient was scaled since backward; None: it is unchanged."""
        if self.left is None or weight.grad is None:
            return None
        gradient, version, before = self.left
        if weight.grad is gradient and gradient._version == version:
            return None
        before, now = local_of(before).double(), local_of(weight.grad).double()
        found: Tensor = ((now * before).sum() / before.square().sum()).float()
        return found


_GRADIENTS = WeakIdKeyDictionary()
"""The smallest trained weight of each model that trains unwrapped, and its `_Gradient`, until ranks average it."""

_AVERAGED = WeakIdKeyDictionary()
"""The gradient of each bare weight, and its version, as the end of the last backward left them."""

_SAME_FACTOR = 1e-3
"""The relative difference of factors that rounding explains."""


def average_gradients(model: nn.Module | nn.Parameter, context: BatchContext) -> None:
    """Implements `Sharded.reduce_gradients`. The host waits for the average.

    Raises:
        GradientsChanged; RefusedElsewhere: on the other ranks, if weights were changed on some.
    """
    ring = context.ring
    versions: Any = context.state(_Versions)
    weights = [model] if isinstance(model, Tensor) else model.parameters()
    trained = _whole_in_ring([x for x in weights if x.requires_grad], ring)
    if not trained:
        return
    refusal: errors.Refused | None = None
    if any(versions.get(x, x._version) != x._version for x in trained):
        refusal = errors.GradientsChanged("weights were changed after the forward", "Call it before optimizer.step().")
    weight = next((x for x in trained if x in _GRADIENTS), trained[0])
    watched: _Gradient | None = _GRADIENTS.pop(weight, None)
    factor = None
    if watched is not None:
        watched.handle.remove()
        factor = watched.factor(weight)
    # The ranks' refusals and factors travel, so that all ranks refuse, or none.
    message = torch.zeros(3, ring.size, device=weight.device)
    message[0, ring.rank] = float(refusal is not None)
    message[1, ring.rank] = 1.0 if factor is None else factor
    message[2, ring.rank] = float(not all(map(_is_averaged, trained)))
    refusals, factors, changed = (ring.mean(message) * ring.size).tolist()
    # If all ranks moved their weights after an average, they moved them alike: that is no refusal.
    reduced: Any = context.state(ReducedGradients)
    if any(refusals) and not (all(refusals) and all(x in reduced for x in trained)):
        ring.agree({}, ring.small_device(weight.device), failure=refusal, doing="averaged its gradients")
    each = [f for f in factors if f and math.isfinite(f)]
    if each and max(each) - min(each) > _SAME_FACTOR * max(map(abs, each)):
        raise errors.GradientsChanged(
            f"each rank scaled its gradients by another factor (from {min(each):.3g} to {max(each):.3g})",
            "The norm of a rank's gradients is not that of the batch's: clip gradients after it.",
        )
    if any(changed):
        average(trained, ring)
    _note_averaged(trained, context)
    for x in trained:  # what comes now may change it, before another forward of this batch (SAM)
        versions.pop(x, None)


def _end(batch: weakref.ref[BatchContext], references: list[weakref.ref[Any]], ring: Ring, _task: int) -> None:
    """Averages the gradients of bare weights at the end of a backward: a program may read them from then on."""
    weights = [x for x in alive(references) if x.requires_grad and x.is_leaf]
    with torch.no_grad():
        average(weights, ring)
    for x in weights:
        if x in _GRADIENTS:  # a program may scale it from here on, if it does so on all ranks
            _GRADIENTS[x].note(x)
        _AVERAGED[x] = None if x.grad is None else weakref.ref(x.grad), 0 if x.grad is None else x.grad._version
    context = batch()
    if context is not None:
        _note_averaged(weights, context)
    averaged = set(map(id, weights))  # a batch may have ended before its backward
    _last[:] = [
        one for one in _last if one.batch is not batch or any(id(x) not in averaged for x in alive(one.weights))
    ]


def _is_averaged(weight: Any) -> bool:
    """Returns True if the gradient is as the end of the last backward left it."""
    gradient, version = _AVERAGED.get(weight, (lambda: ..., 0))
    if gradient is None or weight.grad is None:
        return gradient is None and weight.grad is None
    return gradient() is weight.grad and weight.grad._version == version


def _note_averaged(weights: list[Any], context: BatchContext) -> None:
    reduced: Any = context.state(ReducedGradients)
    reduced.update(dict.fromkeys(weights))
    _last[:] = [one for one in _last if one.batch() is not context or any(x not in reduced for x in alive(one.weights))]


# ---- weights that are noted ------------------------------------------------------------------------------------------


def watch_learned(name: str, captured: Iterable[Tensor], context: BatchContext) -> None:
    """Notes weights of a score_mod that belong to no model, so that no wrapper averages their gradients."""
    own = [x for x in captured if x.is_leaf and x.requires_grad]
    if context.ring.size == 1 or not own:
        return
    models = list(context.log.models)
    known = {id(weight) for model in models for weight in latest_record(model).weights()}
    own = [x for x in own if id(x) not in known]
    # FSDP's weights have no identity while they are gathered.
    if own and not any(map(fsdp.is_sharded, models)):
        _note(f"the score_mod {name}", own, context)


def _note(name: str, trained: list[Any], context: BatchContext) -> None:
    versions = list(map(_VERSION, trained))
    noted: Any = context.state(_Versions)
    for weight, version in zip(trained, versions, strict=True):
        noted.setdefault(weight, version)
    _last[:] = [one for one in _last if one.batch() is context]
    references = list(map(weakref.ref, trained))
    averages = Averages(
        partial(alive, references), partial(_end, weakref.ref(context), references, context.ring), context.ring
    )
    context.state(BackwardEnd).parts[tuple(map(id, trained))] = averages
    if not any(one.name == name and _same(one.weights, trained) for one in _last):
        _last.append(_Trained(name, references, weakref.ref(context), context.ring.size, sum(versions)))


def _same(references: list[weakref.ref[Tensor]], tensors: list[Tensor]) -> bool:
    return len(references) == len(tensors) and all(one() is x for one, x in zip(references, tensors, strict=True))


def warn_if_not_reduced() -> None:
    """Warns, once, if the last batch was followed by a step with gradients that differ from rank to rank."""
    while _last:
        last = _last.pop()
        trained = alive(last.weights)
        # The model is gone; or no step was made since, as while gradients are added up, or without training.
        if len(trained) < len(last.weights) or sum(map(_VERSION, trained)) == last.written:
            continue
        warn(
            f"{last.name} trained in a ring of {last.ring_size}, but neither DDP nor FSDP wraps it and "
            "sharded.reduce_gradients(module) was not called with it: each rank holds the gradient of its own tokens "
            "only, so the replicas drift apart. Call it after backward, once the gradients of a step are complete."
        )


@at_uninstall
def forget() -> None:
    """Forgets the models of the last batch, and removes the hooks on their weights."""
    for watched in list(_GRADIENTS.values()):
        watched.handle.remove()
    _GRADIENTS.clear()
    _AVERAGED.clear()
    _last.clear()
