"""Hooks on modules of a user's model: added once, inert outside a ring, removed by `detach_all`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

_ATTRIBUTE = "_hf_ring_attn_hooks"
_PACKAGE = __name__.partition(".")[0]

_HOOKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Every module that has hooks of ours."""


def attach(module: nn.Module, key: str, before: Callable[..., Any], after: Callable[..., Any] | None = None) -> None:
    """Adds a forward pre-hook, or a pair of hooks, to ``module``, unless it has some under ``key``.

    Args:
        before: (module, args, kwargs), as of a pre-hook with kwargs.
        after: (module, args, output); called after an error, too, but not after Ctrl-C.
    """
    _HOOKED.add(module)  # also a module that was copied with its hooks
    handles: dict[str, list[Any]] = module.__dict__.setdefault(_ATTRIBUTE, {})
    if key in handles:
        return
    handles[key] = [module.register_forward_pre_hook(before, with_kwargs=True)]
    if after is not None:
        handles[key].append(module.register_forward_hook(after, always_call=True))


def replace_forward(module: nn.Module, key: str, make: Callable[[Any], Any]) -> Any:
    """Replaces the forward of ``module`` by ``make(replaced)``, unless that was done under ``key``. Returns it.

    Args:
        make: gets the forward that a program had set on this very module, None if it had set none.
    """
    _HOOKED.add(module)
    handles: dict[str, list[Any]] = module.__dict__.setdefault(_ATTRIBUTE, {})
    if key not in handles:
        handles[key] = [_Forward(module, make(module.__dict__.get("forward")))]
    return handles[key][0].forward


class _Forward:
    def __init__(self, module: nn.Module, forward: Any) -> None:
        self.module, self.replaced, self.forward = module, module.__dict__.get("forward"), forward
        module.__dict__["forward"] = forward

    def remove(self) -> None:
        if self.module.__dict__.get("forward") is self.forward:
            del self.module.__dict__["forward"]
            if self.replaced is not None:
                self.module.__dict__["forward"] = self.replaced


def attached(module: nn.Module, key: str) -> bool:
    """Returns True if ``module`` has hooks under ``key``."""
    return key in module.__dict__.get(_ATTRIBUTE, ())


def detach_all() -> None:
    """Removes every hook that `attach` added."""
    while _HOOKED:
        for handles in _HOOKED.pop().__dict__.pop(_ATTRIBUTE, {}).values():
            for handle in handles:
                handle.remove()


def is_ours(hook: Any) -> bool:
    """Returns True for a hook that this package registered."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == _PACKAGE
