"""How the host of a batch computes its loss: set by hosts, tried by the self-check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .cut import Share


@dataclass
class TrialStep:
    """How the host of a batch computes its loss: a state of the batch, set before a model is admitted.

    Args:
        loss: called with the model, a whole row and a share of it, in the share's context; None: the model's own loss.
        trains: the host sets the model for training first.
        name: what computes the loss, if it is not the host's own; key: tells the step from other steps of a model.
    """

    loss: Callable[[nn.Module, Mapping[str, Any], Share], Any] | None = None
    trains: bool = False
    name: str = ""
    key: tuple[Any, ...] = ()
