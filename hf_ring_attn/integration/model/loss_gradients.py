"""Compares the gradients that the ranks' programs give the loss of a batch, before an optimizer steps by them.

The loss has one value on every rank, so any function of it has one gradient there. A program that also asks its rank's
tokens (twice the loss, if one of them is special) has another on each, perhaps on no row of the self-check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ...comm.ring import Ring
from . import optimizer_steps

TODO = (
    "A program may use the loss in any way, but not by what its rank's tokens or labels are. Look at whole rows in the "
    "collator, and give the batch what you found as another input."
)
_waiting: list[tuple[torch.device, Callable[[], object]]] = []
"""Devices and ends of the comparisons since an optimizer's last step, or since the last batch."""


def start(gradient: Tensor, ring: Ring) -> None:
    """Starts the comparison of a gradient; the host does not wait."""
    optimizer_steps.before_each(_finish_before_step)
    facts = {"gradient of the loss": gradient.detach()}
    doing = "compared the gradient of its loss"
    device = ring.small_device(gradient.device)
    _waiting.append((device, ring.start_agreement(facts, device, TODO, doing=doing)))


def finish() -> None:
    """Ends the comparisons that were started.

    Raises:
        RanksDiffer: on every rank.
    """
    ends, _waiting[:] = list(_waiting), []
    for device, end in ends:
        with _beside(device):
            end()


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Inside, the host waits for a message alone, which began the backward, not for all of the backward."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_stream(device)):
        yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _finish_before_step(_optimizer: Optimizer) -> None:
    finish()


def forget() -> None:
    """Drops the comparisons that were started."""
    _waiting.clear()
