"""Telling a plain loop whose model nothing wraps that its replicas drift apart, or were never the same.

DDP and FSDP average gradients over the ranks of a ring; a bare model needs `Sharded.reduce_gradients`. Whether that was
called is known only when the next batch comes. And they hand out the first rank's weights; those of a bare model are
compared before it trains. The self-check's answers do not tell: the weights that LoRA draws are multiplied by zero.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

from ..context.batch_context import BatchContext
from ..context.model_record import latest_record
from ..log import warn

SAME_WEIGHTS = (
    "Build or load the model alike on every rank (seed before what is initialised at random, LoRA's weights too); DDP "
    "and FSDP see to it by themselves."
)

AVERAGING = {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine"}


class ReducedGradients(set[int]):
    """Identities of the parameters whose gradients `Sharded.reduce_gradients` averaged in one batch."""


_last: list[tuple[str, list[weakref.ref[Tensor]], BatchContext, int]] = []
"""What trains in the last batch, by its name and its tensors, and how often these had been written until then."""


def averages_gradients(model: nn.Module) -> bool:
    """Whether some wrapper in or around ``model`` combines gradients over ranks."""
    if AVERAGING & _classes(model):
        return True
    return any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())


def _classes(model: nn.Module) -> set[str]:
    return {cls.__name__ for module in model.modules() for cls in type(module).__mro__}


def note_trained(model: nn.Module, context: BatchContext) -> None:
    """Notes a model that trains in a ring with nothing that would average its gradients, and compares its weights."""
    if context.ring.size > 1 and model.training and not averages_gradients(model):
        compare(model, context)
        _note(type(model).__name__, model.parameters(), context)


class _Compared(set[str]):
    """The names of the rings in which a model's weights were compared."""


def compare(model: nn.Module, context: BatchContext) -> None:
    """Refuses a model that trains in a ring, and that nothing wraps, if its ranks begin with different weights.

    Reads what is trained, once for each model and ring.

    Raises:
        RanksDiffer: on every rank, with the name of the first weight that differs.
    """
    ring = context.ring
    if ring.size == 1 or not model.training or ring.name in latest_record(model).state(_Compared):
        return
    bare = not averages_gradients(model)
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad and bare}
    if trained:
        device = ring.small_device(next(iter(trained.values())).device)
        ring.agree({"number of weights that train": len(trained)}, device, SAME_WEIGHTS)
        ring.agree({f"weights of {name}": x for name, x in trained.items()}, device, SAME_WEIGHTS)
    latest_record(model).state(_Compared).add(ring.name)


def watch_learned(name: str, captured: Iterable[Tensor], context: BatchContext) -> None:
    """Notes what a score_mod learns that belongs to no model: a wrapper of a model does not average its gradient."""
    own = [x for x in captured if x.is_leaf and x.requires_grad]
    if context.ring.size == 1 or not own:
        return
    models = list(context.log.models)
    known = {id(parameter) for model in models for parameter in model.parameters()}
    own = [x for x in own if id(x) not in known]
    # FSDP's weights have no identity while they are gathered.
    if own and not any("FSDPModule" in _classes(model) for model in models):
        _note(f"what the score_mod {name} learns", own, context)


def _note(name: str, tensors: Iterable[Tensor], context: BatchContext) -> None:
    trained = [x for x in tensors if x.requires_grad]
    if any(known is context and of == name and _same(references, trained) for of, references, known, _ in _last):
        return
    _last[:] = [one for one in _last if one[2] is context]
    _last.append((name, [weakref.ref(x) for x in trained], context, sum(x._version for x in trained)))


def _same(references: list[weakref.ref[Tensor]], tensors: list[Tensor]) -> bool:
    return len(references) == len(tensors) and all(one() is x for one, x in zip(references, tensors, strict=True))


def warn_if_not_reduced() -> None:
    """Warns, once, if the last batch was followed by a step with gradients that differ from rank to rank."""
    while _last:
        name, references, context, written = _last.pop()
        trained = [x for x in (reference() for reference in references) if x is not None]
        # Weights that nobody has written since: gradients are still being added up, or there is no training.
        if sum(x._version for x in trained) == written or all(
            id(x) in context.state(ReducedGradients) for x in trained
        ):
            continue
        warn(
            f"{name} trained in a ring of {context.ring.size}, but neither DDP nor FSDP wraps it and "
            "sharded.reduce_gradients(module) was not called with it: each rank holds the gradient of its own tokens "
            "only, so the replicas drift apart. Call it after backward, once the gradients of a step are complete."
        )
