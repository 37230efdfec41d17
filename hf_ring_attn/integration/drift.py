"""Telling a plain loop whose model nothing wraps that its replicas drift apart.

DDP and FSDP average gradients over the ranks of a ring; a bare model needs `Sharded.reduce_gradients`. Whether that was
called is known only when the next batch comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

from .active import Scope
from .report import warn

AVERAGING = {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine"}
_last: list[tuple[str, list[weakref.ref[Tensor]], Scope, int]] = []
"""What trains in the last batch, by its name and its tensors, and how often these had been written until then."""


def averages_gradients(model: nn.Module) -> bool:
    """Whether some wrapper in or around ``model`` combines gradients over ranks."""
    if AVERAGING & _classes(model):
        return True
    return any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())


def _classes(model: nn.Module) -> set[str]:
    return {cls.__name__ for module in model.modules() for cls in type(module).__mro__}


def watch(model: nn.Module, scope: Scope) -> None:
    """Notes a model that trains in a ring with nothing that would average its gradients."""
    if scope.ring.size > 1 and model.training and not averages_gradients(model):
        _note(type(model).__name__, model.parameters(), scope)


def watch_learned(name: str, captured: Iterable[Tensor], scope: Scope) -> None:
    """Notes what a score_mod learns that belongs to no model: a wrapper of a model does not average its gradient."""
    own = [x for x in captured if x.is_leaf and x.requires_grad]
    if scope.ring.size == 1 or not own:
        return
    models = list(scope.models)
    known = {id(parameter) for model in models for parameter in model.parameters()}
    own = [x for x in own if id(x) not in known]
    # FSDP's weights have no identity while they are gathered.
    if own and not any("FSDPModule" in _classes(model) for model in models):
        _note(f"what the score_mod {name} learns", own, scope)


def _note(name: str, tensors: Iterable[Tensor], scope: Scope) -> None:
    trained = [x for x in tensors if x.requires_grad]
    if any(known is scope and of == name and _same(references, trained) for of, references, known, _ in _last):
        return
    _last[:] = [one for one in _last if one[2] is scope]
    _last.append((name, [weakref.ref(x) for x in trained], scope, sum(x._version for x in trained)))


def _same(references: list[weakref.ref[Tensor]], tensors: list[Tensor]) -> bool:
    return len(references) == len(tensors) and all(one() is x for one, x in zip(references, tensors, strict=True))


def tell() -> None:
    """Warns, once, if the last batch was followed by a step with gradients that differ from rank to rank."""
    while _last:
        name, references, scope, written = _last.pop()
        trained = [x for x in (reference() for reference in references) if x is not None]
        # Weights that nobody has written since: gradients are still being added up, or there is no training.
        if sum(x._version for x in trained) == written or all(id(x) in scope.reduced for x in trained):
            continue
        warn(
            f"{name} trained in a ring of {scope.ring.size}, but neither DDP nor FSDP wraps it and "
            "sharded.reduce_gradients(module) was not called with it: each rank holds the gradient of its own tokens "
            "only, so the replicas drift apart. Call it after backward, once the gradients of a step are complete."
        )
