"""The one mechanism for every change to a host library: guarded, idempotent, undone by `uninstall`.

Changes to a host that is not imported yet are made right after its import. So importing this package costs nothing for
hosts that a program never uses.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ... import errors
from .import_hook import AfterImport, imported

Undo = Callable[[], None]

TESTED = {"transformers": ("5.17", "5.23"), "accelerate": ("1.15", "1.15"), "trl": ("1.16", "1.16")}
"""Host: the oldest and the newest minor version that this package was tested with."""

_ABSENT: Any = object()
_NOTHING = "no such attribute"


@dataclass(frozen=True)
class Change(ABC):
    """A change to a host; ``target`` is "package.module:name"."""

    target: str

    @property
    def key(self) -> str:
        """Identifies a change: of two with the same key, only the first is made."""
        return self.target

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @abstractmethod
    def check(self, module: ModuleType) -> None:
        """Raises ChangedHost if the host is not as this change expects."""

    @abstractmethod
    def apply(self, module: ModuleType) -> Undo:
        """Makes the change and returns what undoes it."""


@dataclass(frozen=True)
class Patch(Change):
    """Replaces one attribute of a host.

    Args:
        target: "package.module:Class.attribute" or "package.module:function".
        signature: the parameters that the host's function (or the property's getter) must have, as `render` writes
            them; None where the host must not have the attribute at all.
        make: maps the host's attribute (None if absent) to its replacement. A function gets the original's name and
            ``__wrapped__``, so inspection shows the original's signature.
    """

    signature: str | None
    make: Callable[[Any], Any]

    def check(self, module: ModuleType) -> None:
        owner, attribute = self._owner(module)
        found = inspect.getattr_static(owner, attribute, _ABSENT)
        seen = _NOTHING
        if found is not _ABSENT:
            function = found.fget if isinstance(found, property) else getattr(owner, attribute)
            seen = render(function) if callable(function) else f"a {type(found).__name__}"
        if seen != (self.signature or _NOTHING):
            raise self._changed(seen)

    def apply(self, module: ModuleType) -> Undo:
        owner, attribute = self._owner(module)
        original = inspect.getattr_static(owner, attribute, None)
        own = vars(owner).get(attribute, _ABSENT)  # from vars(), so that a descriptor is restored as itself
        replacement = self.make(original)
        if inspect.isfunction(replacement) and callable(original):
            functools.update_wrapper(replacement, original)
        setattr(owner, attribute, replacement)

        def undo() -> None:
            if vars(owner).get(attribute, _ABSENT) is not replacement:
                warnings.warn(errors.PatchedByOthers(self.target), stacklevel=4)
            if own is not _ABSENT:
                setattr(owner, attribute, own)
            elif attribute in vars(owner):  # inherited or absent before
                delattr(owner, attribute)

        return undo

    def _owner(self, module: ModuleType) -> tuple[Any, str]:
        *classes, attribute = self.target.partition(":")[2].split(".")
        owner: Any = module
        for name in classes:
            owner = getattr(owner, name, None)
            if owner is None:
                raise self._changed(f"no {name}")
        return owner, attribute

    def _changed(self, found: str) -> errors.ChangedHost:
        return _changed(self.target, found, self.signature or _NOTHING)


@dataclass(frozen=True)
class Registration(Change):
    """Enters ``value`` under ``key`` in a registry of transformers.

    ``target`` names the registry where it is defined, such as "transformers.modeling_utils:AttentionInterface": it has
    ``register(key, value)`` and stores its entries in the dict ``_global_mapping``.
    """

    name: str
    value: Any

    @property
    def key(self) -> str:
        return f"{self.target}[{self.name}]"

    def check(self, module: ModuleType) -> None:
        registry = getattr(module, self.target.partition(":")[2], None)
        has_dict = isinstance(getattr(registry, "_global_mapping", None), dict)
        if not (has_dict and callable(getattr(registry, "register", None))):
            raise _changed(self.target, "no such registry", "register(key, value) and the dict _global_mapping")

    def apply(self, module: ModuleType) -> Undo:
        registry = getattr(module, self.target.partition(":")[2])
        before = registry._global_mapping.get(self.name, _ABSENT)
        registry.register(self.name, self.value)

        def undo() -> None:
            if before is _ABSENT:
                registry._global_mapping.pop(self.name, None)
            else:
                registry._global_mapping[self.name] = before

        return undo


def render(function: Callable[..., Any]) -> str:
    """The parameters of ``function`` without annotations and default values, such as "(self, a, b=, *, c=, **rest)".

    It shows renamed, added, removed and reordered parameters, but no defaults or annotations.
    """
    kinds = inspect.Parameter
    parts: list[str] = []
    starred = False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is kinds.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or parameter.kind in (kinds.VAR_POSITIONAL, kinds.KEYWORD_ONLY)
        prefix = "*" if parameter.kind is kinds.VAR_POSITIONAL else "**" if parameter.kind is kinds.VAR_KEYWORD else ""
        parts.append(prefix + name + ("" if parameter.default is kinds.empty else "="))
    return f"({', '.join(parts)})"


class _Installed:
    """The changes made in this process, and those that wait for their host's import."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.undos: list[tuple[str, Undo]] = []
        self.waiting: dict[str, list[Change]] = {}
        self.warned: set[str] = set()
        self.finder = AfterImport(self.waited_for, lambda name, module: self.apply({name: module}))

    def waited_for(self, name: str) -> bool:
        return name in self.waiting

    def keys(self) -> list[str]:
        return [key for key, _ in self.undos]

    def add(self, changes: Iterable[Change]) -> None:
        with self.lock:
            known = {*self.keys(), *(change.key for waiting in self.waiting.values() for change in waiting)}
            new = [change for change in changes if change.key not in known]
            for change in new:
                self.waiting.setdefault(change.module, []).append(change)
            if self.waiting and self.finder not in sys.meta_path:
                sys.meta_path.insert(0, self.finder)
        try:
            # Outside the lock: another thread may be importing the module, and needs the lock to finish.
            modules = {name: imported(name) for name in dict.fromkeys(change.module for change in new)}
            self.apply({name: module for name, module in modules.items() if module is not None})
        except BaseException:
            self.forget(new)
            raise

    def apply(self, modules: dict[str, ModuleType]) -> None:
        """Makes the changes that wait for these modules: all, or none if one does not fit its host."""
        with self.lock:
            ready = [(change, modules[name]) for name in modules for change in self.waiting.get(name, ())]
            for change, module in ready:
                change.check(module)
            for change, _ in ready:
                self.warn_if_untested(change.module.partition(".")[0])  # first: a filter may turn it into an error
            for change, module in ready:
                self.undos.append((change.key, change.apply(module)))
            self.forget([change for change, _ in ready])

    def forget(self, changes: Sequence[Change]) -> None:
        with self.lock:
            keys = {change.key for change in changes}
            rest = {name: [c for c in waiting if c.key not in keys] for name, waiting in self.waiting.items()}
            self.waiting = {name: waiting for name, waiting in rest.items() if waiting}
            if not self.waiting and self.finder in sys.meta_path:
                sys.meta_path.remove(self.finder)

    def warn_if_untested(self, host: str) -> None:
        if host in self.warned or host not in TESTED:
            return
        oldest, newest = TESTED[host]
        if not _minor(oldest) <= _minor(_version(host)) <= _minor(newest):
            self.warned.add(host)
            warnings.warn(errors.UntestedHost(host, _version(host), _range(host)), stacklevel=5)

    def remove(self) -> None:
        with self.lock:
            self.forget([change for waiting in self.waiting.values() for change in waiting])
            while self.undos:
                self.undos.pop()[1]()
            self.warned.clear()


def _version(host: str) -> str:
    return str(getattr(sys.modules.get(host), "__version__", "of unknown version"))


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _range(host: str) -> str:
    return " to ".join(dict.fromkeys(TESTED[host])) if host in TESTED else "none"


def _changed(target: str, found: str, needed: str) -> errors.ChangedHost:
    host = target.partition(":")[0].partition(".")[0]
    return errors.ChangedHost(target, found, needed, host, _version(host), _range(host))


_installed = _Installed()


def install(changes: Iterable[Change]) -> None:
    """Makes changes to host libraries, each once; those of a module that is not imported yet follow its import.

    Raises:
        ChangedHost: a host's function has other parameters than its patch needs; then nothing is changed. A waiting
            change raises it at the import of the host's module.
        ImportedTooEarly: called in the middle of the import of a host's module.

    Warns:
        UntestedHost: the host's version is outside `TESTED`; once per host.
    """
    _installed.add(changes)


def installed() -> list[str]:
    """The current changes, in order."""
    return _installed.keys()


def uninstall() -> None:
    """Undoes every change: restores the original attribute objects and drops waiting changes."""
    _installed.remove()
