"""Weights beside the models of a ring that an optimizer steps: a head, a learned scale, a vector that a hook adds.

Neither DDP nor FSDP averages their gradients, nor the end of a backward. If the program does not either, each rank's
weight goes its own way, and nothing fails. So before each step a summary of their gradients is kept, which ranks
compare with their next batch. A message of its own would let the host wait for the GPU in each step, and a rank that
steps an optimizer alone (a probe, for a log) wait for the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ... import errors
from ...comm.ring import Ring
from ..context import model_record
from ..patching import optimizer_steps

SAMPLE = 2**12
"""The most numbers of a gradient that are compared."""
SAME = 1e-3
"""The relative difference that rounding explains, where each rank computed the gradient of whole rows."""
TODO = (
    "No wrapper averages the gradients of weights beside the model, and each rank has that of its own tokens. After "
    "each backward call reduce_gradients for them, too, also under DDP and FSDP2. Or all ranks must compute them of "
    "whole rows."
)

_beside: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[weakref.ref[Tensor]]]] = weakref.WeakKeyDictionary()
"""The number of an optimizer's weights, and those that are of no model."""
_stepped: list[tuple[tuple[int, ...], Tensor]] = []
"""Shapes of weights in steps since the last batch, and the summaries of their gradients."""


def watch() -> None:
    """Keeps summaries of the gradients by which optimizers step from now on."""
    optimizer_steps.call_before_each_step(_note)


def _note(optimizer: Optimizer) -> None:
    weights = [x for group in optimizer.param_groups for x in group["params"]]
    count, found = _beside.get(optimizer, (0, []))
    if count != len(weights):  # its first step, or weights were added
        known = model_record.weights_of_models()
        found = [weakref.ref(x) for x in weights if id(x) not in known and type(x) in (Tensor, nn.Parameter)]
        _beside[optimizer] = len(weights), found
    alive = (x for reference in found if (x := reference()) is not None)
    _stepped.extend((tuple(x.shape), _summary(x)) for x in alive)


def start_comparison(ring: Ring, device: torch.device) -> tuple[list[Any], Callable[[list[list[int]]], None]]:
    """Returns three integers of the steps since the last batch, and what to call with those of all ranks.

    Args:
        device: of the message with these integers.

    Raises (that function):
        RanksDiffer: on every rank, with the shape of the first weight whose gradient differs.
    """
    steps = [(shape, summary.to(device)) for shape, summary in _stepped]
    _stepped.clear()

    def end(found: list[list[int]]) -> None:
        counts, *sums = found
        if not all(counts) or len(set(counts)) > 1 or not _differ(torch.tensor(sums).view(torch.float64)):
            return
        everyone = torch.stack(ring.objects(torch.stack([summary for _, summary in steps]).cpu()), -1)
        place = next((place for place, of_one in enumerate(everyone) if _differ(of_one)), 0)
        what = f"gradient (its norm) of a weight of shape {steps[place][0]} beside the model"
        raise errors.RanksDiffer(what, everyone[place, 0].tolist(), TODO)

    total = torch.stack([summary for _, summary in steps]).sum(0).view(torch.int64) if steps else (0, 0)
    return [len(steps), *total], end


def _summary(weight: Tensor) -> Tensor:
    """[2] float64: the norm of a sample of a gradient, and its part along one direction."""
    gradient = weight.grad
    if gradient is None:
        return torch.zeros(2, dtype=torch.float64, device=weight.device)
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient.detach()
    few = gradient.flatten()[:: max(1, -(-gradient.numel() // SAMPLE))].double()
    along = few @ torch.arange(len(few), dtype=torch.float64, device=few.device).cos()
    return torch.stack([torch.linalg.vector_norm(few), along])


def _differ(of_ranks: Tensor) -> bool:
    """Returns True if norms and parts [2, ranks] differ by more than rounding."""
    size, part = of_ranks
    finite = size.isfinite() & part.isfinite()  # a step that a scaler of float16 skips has none
    apart = torch.maximum(size.amax() - size.amin(), part.amax() - part.amin())
    return bool(finite.all() and apart > SAME * size.amax())


def forget() -> None:
    """Forgets all optimizers and steps."""
    _beside.clear()
    _stepped.clear()
