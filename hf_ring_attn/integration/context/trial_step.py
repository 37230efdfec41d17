"""The loss that a host computes of a batch, for the self-check to try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .local_batch import LocalBatch


@dataclass
class TrialStep:
    """The loss of a batch's host: a state of the batch, set before a model is admitted.

    Args:
        loss: called with the model, a whole row and a local batch of it, in its context; None: the model's loss.
        trains: the host sets the model to training mode first.
        name: the user's function that computes the loss, if any. key: identifies the step among steps of a model.
        one_valued: of each model in it, if the self-check found the same loss on every rank, not a part of it on each.
    """

    loss: Callable[[nn.Module, Mapping[str, Any], LocalBatch], Any] | None = None
    trains: bool = False
    name: str = ""
    key: tuple[Any, ...] = ()
    one_valued: list[bool] = field(default_factory=list)

    @property
    def has_one_value(self) -> bool:
        """The loss is the same on every rank; with a teacher as the model it may be so where a student's is not."""
        return bool(self.one_valued) and all(self.one_valued)
