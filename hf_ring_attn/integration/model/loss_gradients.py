"""Compares the gradients that the ranks' programs give the loss of a batch, before an optimizer steps by them.

The loss has one value on every rank, so any function of it has one gradient there. A program that also asks its rank's
tokens (twice the loss, if one of them is special) has another on each, perhaps on no row of the self-check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...comm.ring import Ring

TODO = (
    "A program may use the loss in any way, but not by what its rank's tokens or labels are. Look at whole rows in the "
    "collator, and give the batch what you found as another input."
)
_waiting: list[Callable[[], object]] = []
"""Ends of the comparisons since an optimizer's last step, or since the last batch."""
_hook: list[RemovableHandle] = []
"""The handle of the hook before each optimizer's step, once a gradient was compared."""


def start(gradient: Tensor, ring: Ring) -> None:
    """Starts the comparison of a gradient; the host does not wait."""
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_finish_before_step))
    facts = {"gradient of the loss": gradient.detach()}
    doing = "compared the gradient of its loss"
    _waiting.append(ring.start_agreement(facts, ring.small_device(gradient.device), TODO, doing=doing))


def finish() -> None:
    """Ends the comparisons that were started.

    Raises:
        RanksDiffer: on every rank.
    """
    ends, _waiting[:] = list(_waiting), []
    for end in ends:
        end()


def _finish_before_step(*_given: Any) -> None:
    finish()


def forget() -> None:
    """Removes the hook before optimizers' steps."""
    while _hook:
        _hook.pop().remove()
    _waiting.clear()
