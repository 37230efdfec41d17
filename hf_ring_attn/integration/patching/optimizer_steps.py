"""Calls functions before each step of any optimizer: when its gradients are complete, before it changes weights.

A step that gets a closure, as of Lightning's Trainer, calls it for the loss and the gradients. So the functions are
called after the closure, each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .changes import at_uninstall

_called: list[Callable[[Optimizer], None]] = []
_hook: list[RemovableHandle] = []
"""The handle of the one hook, since `watch`."""


def watch() -> None:
    """Hooks all optimizers: the closure of the first step that is to be watched may register the functions."""
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before))


def call_before_each_step(function: Callable[[Optimizer], None]) -> None:
    """Calls ``function`` with the optimizer before each later step, or at the end of each call of the step's closure.

    To register it again has no effect.
    """
    if function not in _called:
        _called.append(function)
    watch()


def call_no_more(function: Callable[[Optimizer], None]) -> None:
    """Calls ``function`` before no later step, until it is registered again."""
    _called.remove(function)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook: torch calls the step with what it returns. ``args``: the optimizer, and the closure perhaps."""
    by_name = "closure" in kwargs
    closure = kwargs["closure"] if by_name else next(iter(args[1:2]), None)
    if not callable(closure):
        _call_all(optimizer)
        return None

    def then_called(*given: Any, **named: Any) -> Any:
        result = closure(*given, **named)
        _call_all(optimizer)
        return result

    return (args, {**kwargs, "closure": then_called}) if by_name else ((args[0], then_called, *args[2:]), kwargs)


def _call_all(optimizer: Optimizer) -> None:
    for function in list(_called):
        function(optimizer)


def weights_of(optimizer: Optimizer) -> list[Tensor]:
    """The weights that an optimizer steps."""
    return [x for group in optimizer.param_groups for x in group["params"]]


@at_uninstall
def forget() -> None:
    """Removes the hook and the functions."""
    while _hook:
        _hook.pop().remove()
    _called.clear()
