"""Weights beside the models of a ring that an optimizer steps: a head, a learned scale, a vector that a hook adds.

Neither DDP nor FSDP averages their gradients, nor the end of a backward. If the program does not either, each rank's
weight goes its own way, and nothing fails. So before each step a summary of their gradients is kept, which ranks
compare with their next batch: a message of their own might wait for ranks that have no such optimizer.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ... import errors
from ..context import model_record
from ..patching import optimizer_steps

SAMPLE = 2**12
"""The most numbers of a gradient that are compared."""
SAME = 1e-3
"""The relative difference that rounding explains, where each rank computed the gradient of whole rows."""
TODO = (
    "No wrapper averages the gradients of weights outside of the model: call sharded.reduce_gradients(module) for "
    "theirs after the backward, or make them a part of the model that DDP or FSDP2 wraps."
)

_beside: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[weakref.ref[Tensor]]]] = weakref.WeakKeyDictionary()
"""The number of an optimizer's weights, and those that are of no model."""
_steps: list[Tensor] = []
"""[3] float64 for each step since the last batch: how many gradients, a norm of them, and a part along a direction."""


def watch() -> None:
    """Notes the gradients by which optimizers step from now on."""
    optimizer_steps.call_before_each_step(_note)


def _note(optimizer: Optimizer) -> None:
    weights = [x for group in optimizer.param_groups for x in group["params"]]
    count, found = _beside.get(optimizer, (0, []))
    if count != len(weights):  # the first step, or weights were added
        known = model_record.weights_of_models()
        found = [weakref.ref(x) for x in weights if id(x) not in known and type(x) in (Tensor, nn.Parameter)]
        _beside[optimizer] = len(weights), found
    alive = [x for reference in found if (x := reference()) is not None]
    gradients = [x.grad.detach() for x in alive if type(x.grad) is Tensor and x.grad.layout == torch.strided]
    if not gradients:
        return
    sampled = [x.flatten()[:: -(-x.numel() // SAMPLE) or 1].double() for x in gradients]
    flat = torch.cat([x.to(sampled[0].device) for x in sampled])
    along = flat @ torch.arange(len(flat), dtype=torch.float64, device=flat.device).cos()
    _steps.append(torch.stack([along.new_tensor(float(len(flat))), torch.linalg.vector_norm(flat), along]))


def numbers(device: torch.device) -> list[Any]:
    """Three integers for the other ranks, `refuse`: of all steps since the last batch. ``device``: of the message."""
    if not _steps:
        return [0, 0, 0]
    summary = torch.stack([x.to(device) for x in _steps]).sum(0)
    _steps.clear()
    return [*summary.view(torch.int64)]


def refuse(counts: list[int], norms: list[int], along: list[int]) -> None:
    """Raises RanksDiffer, on every rank, if ranks stepped by other gradients. Of all ranks' `numbers`."""
    count, size, part = torch.tensor([counts, norms, along], dtype=torch.int64).view(torch.float64)
    if not count.any() or (count != count[0]).any() or not (size.isfinite() & part.isfinite()).all():
        return
    if torch.maximum(size.amax() - size.amin(), part.amax() - part.amin()) > SAME * size.amax():
        raise errors.RanksDiffer("gradient of weights beside the model (its norm)", size.tolist(), TODO)


def forget() -> None:
    """Forgets all optimizers and steps."""
    _beside.clear()
    _steps.clear()
