"""Tokens that a program changes between `shard` and the model: right if each changes by itself, which is not seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..context.introspect import is_dtensor, loss_models_of, name_of
from ..context.tracked_input import TrackedInput
from ..log import warn

CHANGED = (
    "{model} was called in a ring with other {name} than those of the batch. That is right if each token was changed "
    "by itself (its word, its place in position_ids, noise). It is not right if a change depends on other tokens (a "
    "mean, neighbours, counts) or on places in the tensor, since a rank has only some of the tokens. Then change whole "
    "rows: before shard(), or in a Trainer's collator."
)
MOST = 1024
"""The most tokens at either end of a rank's rows whose embeddings are compared."""


def warn_if_changed(model: nn.Module, given: Mapping[str, Any], tracked: Mapping[str, TrackedInput]) -> None:
    """Warns if a call of ``model`` has other tokens than the batch. ``tracked``: the batch's inputs."""
    for name in ("input_ids", "inputs_embeds"):
        x, own = given.get(name), tracked.get(name)
        if not isinstance(x, Tensor):
            continue
        if own is None:
            changed = name == "inputs_embeds" and "input_ids" in tracked and not _embeds(model, tracked["input_ids"], x)
        else:
            changed = not own.is_(x) and not own.equals(x)
        if changed:
            warn(CHANGED.format(model=name_of(model), name=name))


def _embeds(model: nn.Module, ids: TrackedInput, x: Tensor) -> bool:
    """Returns True if ``x`` is what the model's embeddings make of the batch's ids, or if that is unknown."""
    table = next((one.get_input_embeddings() for one in loss_models_of(model)), None)
    own = ids.value
    if not isinstance(table, nn.Module) or not isinstance(own, Tensor) or any(map(is_dtensor, table.parameters())):
        return True
    if x.shape[:2] != own.shape:
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        ends = torch.cat([own[:, :MOST], own[:, -MOST:]], 1)
        made = table.forward(ends)
    found = torch.cat([x[:, :MOST], x[:, -MOST:]], 1).detach()
    return made.shape == found.shape and torch.equal(made.to(found.dtype), found)
