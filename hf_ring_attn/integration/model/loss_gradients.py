"""Compares the gradients that the ranks' programs give the loss of a batch, before an optimizer steps by them.

The loss has one value on every rank, so any function of it has one gradient there. A program that also asks its rank's
tokens (twice the loss, if one of them is special) has another on each, perhaps on no row of the self-check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...comm.ring import Ring

TODO = (
    "A program may use the loss in any way, but not by what its rank's tokens or labels are. Look at whole rows in the "
    "collator, and give the batch what you found as another input."
)
_waiting: list[tuple[torch.device, Callable[[], object]]] = []
"""Devices and ends of the comparisons since an optimizer's last step, or since the last batch."""
_hook: list[RemovableHandle] = []
"""The handle of the hook before each optimizer's step, once a gradient was compared."""


def start(gradient: Tensor, ring: Ring) -> None:
    """Starts the comparison of a gradient; the host does not wait."""
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_finish_before_step))
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


def _finish_before_step(*_given: Any) -> None:
    finish()


def forget() -> None:
    """Removes the hook before optimizers' steps."""
    while _hook:
        _hook.pop().remove()
    _waiting.clear()
