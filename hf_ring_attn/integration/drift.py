"""Telling a plain loop whose model nothing wraps that its replicas drift apart.

DDP and FSDP average gradients over the ranks of a ring; a bare model needs `Sharded.reduce_gradients`. Whether that was
called is known only when the next batch comes.
"""

from __future__ import annotations

import weakref

from torch import nn

from .active import Scope
from .report import warn

AVERAGING = {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine"}
_last: list[tuple[weakref.ref[nn.Module], Scope, int]] = []
"""The model that ran last, its batch, and how often its weights had been written until then."""


def averages_gradients(model: nn.Module) -> bool:
    """Whether some wrapper in or around ``model`` combines gradients over ranks."""
    if any(cls.__name__ in AVERAGING for module in model.modules() for cls in type(module).__mro__):
        return True
    return any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())


def watch(model: nn.Module, scope: Scope) -> None:
    """Notes a model that trains in a ring with nothing that would average its gradients."""
    if scope.ring.size > 1 and model.training and not averages_gradients(model):
        _last[:] = [(weakref.ref(model), scope, _writes(model))]


def _writes(model: nn.Module) -> int:
    return sum(parameter._version for parameter in model.parameters() if parameter.requires_grad)


def tell() -> None:
    """Warns, once, if the last batch was followed by a step with gradients that differ from rank to rank."""
    while _last:
        reference, scope, written = _last.pop()
        model = reference()
        # Weights that nobody has written since: gradients are still being added up, or there is no training.
        if model is None or scope.reduced or _writes(model) == written:
            continue
        warn(
            f"{type(model).__name__} trained in a ring of {scope.ring.size}, but neither DDP nor FSDP wraps it and "
            "sharded.reduce_gradients(model) was not called: each rank holds the gradient of its own tokens only, so "
            "the replicas drift apart. Call it after backward, once the gradients of a step are complete."
        )
