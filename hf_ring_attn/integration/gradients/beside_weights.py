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
from ..context.references import alive
from ..patching import optimizer_steps
from ..patching.changes import at_uninstall
from .loss_gradients import differ, summary_of

GROUPS = 16
"""So many weights are compared by themselves; of more, sums of some of them."""
COLUMNS = 1 + 2 * GROUPS
MOST = 16
"""Steps between two batches of a ring, after which none is compared: the program trains something else meanwhile."""
ROUNDING = 1e-5
"""A part of the largest norm that may be rounding: the gradient of a weight that should have none."""
TODO = (
    "No wrapper averages the gradients of weights beside the model, and each rank has that of its own tokens. After "
    "each backward call reduce_gradients for them, too, also under DDP and FSDP2. Or all ranks must compute them of "
    "whole rows."
)

_beside: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[weakref.ref[Tensor]]]] = weakref.WeakKeyDictionary()
"""The number of an optimizer's weights, and those that are of no model."""
_stepped: list[list[tuple[tuple[int, ...], Tensor]]] = []
"""For each step since the last batch the shapes of such weights, and the summaries of their gradients."""
at_uninstall(_beside.clear)
at_uninstall(_stepped.clear)


def watch() -> None:
    """Keeps summaries of the gradients by which optimizers step from now on, in up to `MOST` steps."""
    optimizer_steps.call_before_each_step(_note)


def _note(optimizer: Optimizer) -> None:
    if len(_stepped) == MOST:
        _stepped.clear()
        optimizer_steps.call_no_more(_note)
        return
    weights = optimizer_steps.weights_of(optimizer)
    count, found = _beside.get(optimizer, (0, []))
    if count != len(weights):  # its first step, or weights were added
        known = model_record.weights_of_models()
        found = [weakref.ref(x) for x in weights if id(x) not in known and type(x) in (Tensor, nn.Parameter)]
        _beside[optimizer] = len(weights), found
    if weights := alive(found):
        _stepped.append([(tuple(x.shape), summary_of(x.grad, x.device)) for x in weights])


def start_comparison(ring: Ring, device: torch.device) -> tuple[list[Any], Callable[[list[list[int]]], None]]:
    """Returns `COLUMNS` integers of the steps since the last batch, and what to call with those of all ranks.

    Args:
        device: of the message with these integers.

    Raises (that function):
        RanksDiffer: on every rank, with the shape of the first weight whose gradient differs.
    """
    steps = [(shape, summary.to(device)) for step in _stepped for shape, summary in step]
    _stepped.clear()

    def end(found: list[list[int]]) -> None:
        counts, *sums = found
        if not all(counts) or len(set(counts)) > 1:
            return
        groups = torch.tensor(sums).view(torch.float64).unflatten(0, (GROUPS, 2))
        least = ROUNDING * float(groups[:, 0].nan_to_num(0.0, 0.0).amax())
        if any(differ(of_ranks, least) for of_ranks in groups):
            everyone = torch.stack(ring.objects(torch.stack([summary for _, summary in steps]).cpu()), -1)
            place = next((place for place, of_ranks in enumerate(everyone) if differ(of_ranks, least)), 0)
            what = f"gradient (its norm) of a weight of shape {steps[place][0]} beside the model"
            raise errors.RanksDiffer(what, everyone[place, 0].tolist(), TODO)

    groups = torch.zeros(GROUPS, 2, dtype=torch.float64, device=device)
    for place, (_, summary) in enumerate(steps):
        groups[place % GROUPS] += summary
    return [len(steps), *(groups.view(torch.int64).flatten() if steps else [0] * 2 * GROUPS)], end
