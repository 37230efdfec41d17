"""Calls functions before each step of any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_called: list[Callable[[Optimizer], None]] = []
_hook: list[RemovableHandle] = []
"""The handle of the one hook, once a function is to be called."""


def call_before_each_step(function: Callable[[Optimizer], None]) -> None:
    """Calls ``function`` with the optimizer before each later step. To register it again has no effect."""
    if function not in _called:
        _called.append(function)
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before))


def call_no_more(function: Callable[[Optimizer], None]) -> None:
    """Calls ``function`` before no later step, until it is registered again."""
    _called.remove(function)


def _before(optimizer: Optimizer, *_given: Any) -> None:
    for function in list(_called):
        function(optimizer)


def weights_of(optimizer: Optimizer) -> list[Tensor]:
    """The weights that an optimizer steps."""
    return [x for group in optimizer.param_groups for x in group["params"]]


def forget() -> None:
    """Removes the hook and the functions."""
    while _hook:
        _hook.pop().remove()
    _called.clear()
