"""Runs a callback right after a module has been imported."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ... import errors

Then = Callable[[str, ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """A finder for the head of ``sys.meta_path``: finds modules as usual, and runs ``then`` after each wanted one.

    Args:
        wanted: returns True for the full name of a module to wait for.
        then: called with the name and the module after its import, which raises its errors.
    """

    def __init__(self, wanted: Callable[[str], bool], then: Then) -> None:
        self.wanted = wanted
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self.wanted(fullname):
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self.then)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Replaces a module's loader until the module runs, then restores it."""

    def __init__(self, real: Any, then: Then) -> None:
        self.real = real
        self.then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None, "the import system runs modules that have a spec"
        spec.loader = module.__loader__ = self.real
        self.real.exec_module(module)
        # A module may replace itself in sys.modules, as transformers' lazy packages do.
        self.then(spec.name, sys.modules.get(spec.name, module))

    def __getattr__(self, name: str) -> Any:
        if name == "real":  # while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.real, name)


def imported(name: str) -> ModuleType | None:
    """The module if it has been imported, after waiting for a thread that is importing it; else None.

    Raises:
        ImportedTooEarly: this very thread is importing it, further up the stack.
    """
    module = sys.modules.get(name)
    if module is None:
        return None
    if getattr(module.__spec__, "_initializing", False):
        module = importlib.import_module(name)  # returns at once only if this very thread is importing it
        if getattr(module.__spec__, "_initializing", False):
            raise errors.ImportedTooEarly(name)
    return module
