"""The one mechanism for every change to a host library: guarded, idempotent, undone by `uninstall`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch

from ... import errors

Undo = Callable[[], bool]
"""Returns False if another program had changed the attribute again."""

TESTED = {
    "torch": ("2.11", "2.15"), "transformers": ("5.17", "5.24"), "accelerate": ("1.15", "1.15"),
    "trl": ("1.16", "1.16"), "peft": ("0.21", "0.21"), "bitsandbytes": ("0.50", "0.50"),
}  # fmt: skip
"""Host: the oldest and the newest minor version that this package was tested with."""

NEWEST_ON_GPUS = {"torch": "2.11"}
"""The newest minor version of a host that was tested on GPUs, where newer ones were tested on CPUs."""

_ABSENT: Any = object()
_MARK = "_hf_ring_attn_patch"
"""The attribute of our functions: they have the name and the module of the host's."""


@dataclass(frozen=True)
class _Target:
    """The place of a change; ``target`` is "package.module:name"."""

    target: str

    @property
    def key(self) -> str:
        """Identifies a change: of two with the same key, only the first is made."""
        return self.target

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]


@dataclass(frozen=True)
class Patch(_Target):
    """Replaces one attribute of a host.

    Args:
        target: "package.module:Class.attribute" or "package.module:function".
        signature: the parameters that the host's function or property must have, as `render` writes them.
        make: maps the host's attribute to its replacement. A function gets the original's name and ``__wrapped__``, so
            inspection shows the original's signature.
    """

    signature: str
    make: Callable[[Any], Any]

    def check(self, module: ModuleType) -> None:
        """Raises ChangedHost if the host is not as this change expects."""
        owner, attribute = self._owner(module)
        found = inspect.getattr_static(owner, attribute, _ABSENT)
        seen = "no such attribute"
        if found is not _ABSENT:
            function = found.fget if isinstance(found, property) else getattr(owner, attribute)
            seen = render(function) if callable(function) else f"a {type(found).__name__}"
        if seen != self.signature:
            raise _changed(self.target, seen, self.signature)

    def apply(self, module: ModuleType) -> Undo:
        """Makes the change and returns what undoes it."""
        owner, attribute = self._owner(module)
        original = inspect.getattr_static(owner, attribute, None)
        own = vars(owner).get(attribute, _ABSENT)  # from vars(), so that a descriptor is restored as itself
        replacement = self.make(original)
        if inspect.isfunction(replacement) and callable(original):
            functools.update_wrapper(replacement, original)
            setattr(replacement, _MARK, True)
        setattr(owner, attribute, replacement)

        def undo() -> bool:
            is_ours = vars(owner).get(attribute, _ABSENT) is replacement
            if own is not _ABSENT:
                setattr(owner, attribute, own)
            elif attribute in vars(owner):  # inherited before
                delattr(owner, attribute)
            return is_ours

        return undo

    def _owner(self, module: ModuleType) -> tuple[Any, str]:
        *classes, attribute = self.target.partition(":")[2].split(".")
        owner: Any = module
        for name in classes:
            owner = getattr(owner, name, None)
            if owner is None:
                raise _changed(self.target, f"no {name}", self.signature)
        return owner, attribute


@dataclass(frozen=True)
class Registration(_Target):
    """Enters ``value`` under ``key`` in a registry of transformers.

    ``target`` names the registry where it is defined, such as "transformers.modeling_utils:AttentionInterface": it has
    ``register(key, value)`` and stores its entries in the dict ``_global_mapping``.
    """

    name: str
    value: Any

    signature: ClassVar[str] = "register(key, value) and the dict _global_mapping"

    @property
    def key(self) -> str:
        return f"{self.target}[{self.name}]"

    def check(self, module: ModuleType) -> None:
        registry = getattr(module, self.target.partition(":")[2], None)
        has_dict = isinstance(getattr(registry, "_global_mapping", None), dict)
        if not (has_dict and callable(getattr(registry, "register", None))):
            raise _changed(self.target, "no such registry", self.signature)

    def apply(self, module: ModuleType) -> Undo:
        registry = getattr(module, self.target.partition(":")[2])
        before = registry._global_mapping.get(self.name, _ABSENT)
        registry.register(self.name, self.value)

        def undo() -> bool:
            if before is _ABSENT:
                registry._global_mapping.pop(self.name, None)
            else:
                registry._global_mapping[self.name] = before
            return True

        return undo


Change = Patch | Registration


Original = Callable[..., Any]
"""A host's function, as the one that stands in for it gets it."""


def around(run: Callable[..., Any]) -> Callable[[Any], Any]:
    """Decorates a function that stands in for a host's, and makes it a `Patch.make`.

    Args:
        run: gets the host's function, and then the arguments of the call.
    """

    def make(original: Any) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return run(original, *args, **kwargs)

        return replacement

    return make


def target_of(owner: type) -> str:
    """A class as targets of changes name it: "package.module:Class"."""
    return f"{owner.__module__}:{owner.__qualname__}"


def has_patch(owner: type, attribute: str) -> bool:
    """Returns True if a `Patch` replaced an attribute of a class, and was not undone."""
    return f"{target_of(owner)}.{attribute}" in installed()


def is_patch(function: Any) -> bool:
    """Returns True for a function that a `Patch` put in a host's place, or a wrapper with its attributes."""
    return hasattr(function, _MARK)


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


def _version(host: str) -> str:
    return str(getattr(sys.modules.get(host), "__version__", "an unknown version"))


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def tested_range(host: str) -> str:
    """Returns the tested versions of a host in words: "1.16", "5.17 to 5.24", "2.11, on CPUs to 2.15"."""
    if host not in TESTED:
        return "none"
    oldest, newest = TESTED[host]
    on_gpus = NEWEST_ON_GPUS.get(host, newest)
    return " to ".join(dict.fromkeys((oldest, on_gpus))) + (f", on CPUs to {newest}" if newest != on_gpus else "")


def requirement(host: str) -> str:
    """The tested versions of a host as pip takes them: "transformers>=5.17,<5.25"."""
    oldest, newest = TESTED[host][0], NEWEST_ON_GPUS.get(host, TESTED[host][1])
    major, minor = _minor(newest)
    return f"{host}>={oldest},<{major}.{minor + 1}"


def untested() -> list[str]:
    """The imported hosts in versions that are not tested."""
    return [host for host in TESTED if _is_untested(host)]


def _is_untested(host: str) -> bool:
    return host in sys.modules and not is_tested(host, _version(host))


def _changed(target: str, found: str, needed: str) -> errors.ChangedHost:
    host = target.partition(":")[0].partition(".")[0]
    return errors.ChangedHost(target, found, needed, host, _version(host), tested_range(host))


_lock = threading.RLock()
_undos: list[tuple[str, Undo]] = []
"""The current changes by key, in order."""
_warned: set[str] = set()
"""The hosts of which an untested version was reported."""


def install(changes: Iterable[Change]) -> None:
    """Makes changes to host modules that are imported, each once: all of them, or none if one does not fit its host.

    Raises:
        ChangedHost: a host's function has other parameters than its patch needs, or its module is gone.

    Warns:
        UntestedHost: the version of an imported host is outside `TESTED`; once per host.
    """
    with _lock:
        done = installed()
        new = [change for change in changes if change.key not in done]
        for change in new:
            if _is_gone(change.module):
                raise _changed(change.target, "no such module", change.signature)
        ready = [(change, sys.modules[change.module]) for change in new if change.module in sys.modules]
        for change, module in ready:
            change.check(module)
        for host in TESTED:
            warn_if_untested(host)  # first: a filter may turn it into an error
        _undos.extend((change.key, change.apply(module)) for change, module in ready)


def _is_gone(module: str) -> bool:
    """Returns True if an imported package has no such module: its first part that is not imported does not exist."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    name = next((name for name in names if name not in sys.modules), module)
    package = sys.modules.get(name.rpartition(".")[0])
    return name not in sys.modules and hasattr(package, "__path__") and importlib.util.find_spec(name) is None


_forgotten: list[Callable[[], object]] = []
"""Functions that clear the globals of other files."""


def at_uninstall(forget: Callable[[], object]) -> Callable[[], object]:
    """Lets `uninstall` call ``forget`` before it undoes any change. Also a decorator."""
    _forgotten.append(forget)
    return forget


def installed() -> list[str]:
    """The keys of the current changes, in order."""
    return [key for key, _ in _undos]


def uninstall() -> None:
    """Undoes every change: restores the original attribute objects, and clears what files of this package remember.

    Warns:
        PatchedByOthers: of attributes that another program changed again, when all are restored.
    """
    others = []
    for forget in _forgotten:
        forget()
    with _lock:
        while _undos:
            key, undo = _undos.pop()
            others += [] if undo() else [key]
        _warned.clear()
    for key in others:
        warnings.warn(errors.PatchedByOthers(key), stacklevel=4)


def is_tested(host: str, version: str) -> bool:
    """Returns True if ``version`` is within the tested ones of a host in `TESTED`: those of GPUs where there is one."""
    newest = NEWEST_ON_GPUS.get(host, TESTED[host][1])
    return _is_tested_on_cpus(host, version) and (_minor(version) <= _minor(newest) or not torch.cuda.device_count())


def _is_tested_on_cpus(host: str, version: str) -> bool:
    oldest, newest = TESTED[host]
    return _minor(oldest) <= _minor(version) <= _minor(newest)


def warn_if_untested(host: str) -> None:
    """Warns once (UntestedHost) if ``host`` is imported in a version that is not tested."""
    if host not in _warned and _is_untested(host):
        _warned.add(host)
        found = _version(host)
        where = " on GPUs" if _is_tested_on_cpus(host, found) else ""
        warnings.warn(errors.UntestedHost(host, found + where, tested_range(host), requirement(host)), stacklevel=4)
