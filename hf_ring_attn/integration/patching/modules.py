"""Hooks and attributes of ours on a user's modules, and on other objects: put there, recognized, and taken off again.

Each has a handle, whose ``remove`` does nothing the second time. Some stay for a scope, such as a batch's context: a
handle is a context manager, for an `ExitStack`. So it comes off after an error and after Ctrl-C, too, after which torch
calls no hook. Others stay until `remove_all`, and are inert outside a ring. docs/project/design.md lists them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
"""torch's tables of a module's hooks."""
_PACKAGE = __name__.partition(".")[0]
_PREFIX = f"_{_PACKAGE}_"
"""The beginning of the names of our attributes."""
_ATTRIBUTE = _PREFIX + "handles"
"""The attribute with the handles that stay, by key; a copy of a module has its own."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, as a pre-hook with kwargs returns them."""

_HOLDING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Every module that has such handles."""


class Replaced:
    """An attribute of a module or another object that has another value until `remove`. Like torch's handle of a hook.

    Attributes:
        value: ours. before: the object's own; ``...`` if it had none, but perhaps its class.
    """

    def __init__(self, owner: object, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value
        self.before = vars(owner).get(name, ...)
        vars(owner)[name] = value

    def remove(self) -> None:
        """Brings back what was there before, unless the program has replaced the value since."""
        own = vars(self.owner)
        if own.get(self.name, ...) is self.value:
            del own[self.name]
            if self.before is not ...:
                own[self.name] = self.before

    def __enter__(self) -> Replaced:
        return self

    def __exit__(self, *_error: object) -> None:
        self.remove()


class OwnForward:
    """A forward that replaces a module's own, and can call that.

    Attributes:
        replaced: the one that the program set on this module, if any.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.replaced = module, module.__dict__.get("forward")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The program's; else its class's as of now, which a program may have changed since."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def attach(module: nn.Module, key: str, before: Callable[..., Any], after: Callable[..., Any] | None = None) -> None:
    """Adds a forward pre-hook, or a pair of hooks, to ``module`` until `remove_all`, unless it has some under ``key``.

    Args:
        before: (module, args, kwargs), as of a pre-hook with kwargs.
        after: (module, args, output); called after an error, too. After Ctrl-C it is not called before `remove_all`.
    """
    if not attached(module, key):
        handles: list[Any] = [module.register_forward_pre_hook(before, with_kwargs=True)]
        if after is not None:
            handles += [module.register_forward_hook(after, always_call=True), _End(module, after)]
        keep(module, key, handles)


class _End(NamedTuple):
    """The end of a call that Ctrl-C may have cut off."""

    module: nn.Module
    after: Callable[..., Any]

    def remove(self) -> None:
        self.after(self.module, (), None)


def replace(module: nn.Module, name: str, value: Any) -> None:
    """Replaces an attribute of ``module`` itself until `remove_all`. A value that was put there so before comes off."""
    for handle in attached(module, name):
        handle.remove()
    keep(module, name, [Replaced(module, name, value)])


def replace_forward(module: nn.Module, kind: type[OwnForward], *given: Any) -> None:
    """Replaces a module's forward by one of this kind, until `remove_all`, unless it has one.

    Args:
        given: to the kind, after the module.
    """
    if not isinstance(module.__dict__.get("forward"), kind):  # a program may have set its own since
        replace(module, "forward", kind(module, *given))


def attached(module: nn.Module, key: str) -> list[Any]:
    """The handles of ``module`` under a key of `attach`, or under a name of `replace`."""
    handles: dict[str, list[Any]] | None = module.__dict__.get(_ATTRIBUTE)
    if handles is None:
        return []
    _HOLDING.add(module)  # it may be a copy
    return handles.get(key, [])


def remove_all() -> None:
    """Removes all that `attach` and `replace` put on modules, and what hooks noted there in attributes of ours."""
    while _HOLDING:
        own = _HOLDING.pop().__dict__
        for handle in [handle for handles in own.pop(_ATTRIBUTE, {}).values() for handle in handles]:
            handle.remove()
        for name in [name for name in own if name.startswith(_PREFIX)]:
            del own[name]


def is_ours(x: Any) -> bool:
    """Returns True for a hook, or for an attribute's value, of this package."""
    return str(getattr(x, "__module__", "")).partition(".")[0] == _PACKAGE


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """The hooks of a module, and the forward set on it, that are not ours."""
    found = [hook for kind in HOOKS for hook in module.__dict__[kind].values()]
    found += [module.__dict__["forward"]] if "forward" in module.__dict__ else []
    return (hook for hook in found if not is_ours(hook))


def programs_own(x: Any) -> Any:
    """An attribute's value as the program set it: of one of ours what it ``replaced``, None if there was nothing."""
    return getattr(x, "replaced", x) if is_ours(x) else x


def keep(module: nn.Module, key: str, handles: list[Any]) -> None:
    """Keeps handles of what was put on ``module`` until `remove_all`, under a key of its own."""
    _HOLDING.add(module)
    module.__dict__.setdefault(_ATTRIBUTE, {})[key] = handles
