"""Restores what objects of a program write to: collections, counters, running means, random generators."""

from __future__ import annotations

import operator
import site
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .introspect import file_of
from .tracked_input import version_of

MOST = 1 << 16
"""The most entries of a collection, and numbers of a tensor, that are restored."""
DEPTH, OBJECTS = 8, 20_000
"""How far other objects are followed from one, and how many."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)
TORCHS_OWN = frozenset(nn.Module().__dict__)
"""torch's own attributes of every module, parameters among them: FSDP2 exchanges them in a forward."""
COLLECTIONS = {list, dict, set, deque, defaultdict, OrderedDict, Counter}
"""Exact types: a subclass, such as a model's output, may refuse to be changed."""


@contextmanager
def preserved_objects(objects: Iterable[Any], modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores on exit what ``objects`` of a program changed inside. ``modules``: the model's, restored elsewhere.

    Followed are functions and objects of the program's own code, not of installed packages: their closures, globals,
    attributes and collections. Restored are collections, plain values, small tensors and generators.
    """
    found = _Found(modules)
    for x in objects:
        found.visit(x)
    try:
        yield
    finally:
        with ExitStack() as all_of_them:  # if one fails, the others run
            for undo in reversed(found.undos):
                all_of_them.callback(undo)


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[list[Tensor]]:
    """Restores a module's buffers on exit. Yields a list, which has those that were written then."""
    before = [(x, version_of(x), x.clone()) for x in module.buffers()]
    written: list[Tensor] = []
    yield written
    with torch.no_grad():
        for x, version, value in before:
            if version_of(x) != version:
                written.append(x)
                x.copy_(value)


class _Found:
    """Objects found so far, and what restores them. ``modules``: of the model, which `selfcheck.restore` restores."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.of_model = set(map(id, modules))
        self.seen: dict[int, Any] = {}  # they stay alive, so ids are not reused
        self.undos: list[Callable[[], object]] = []

    def visit(self, x: Any, depth: int = 0) -> None:
        if depth > DEPTH or len(self.seen) > OBJECTS or id(x) in self.seen:
            return
        self.seen[id(x)] = x
        for part in self._parts(x):
            self.visit(part, depth + 1)

    def _parts(self, x: Any) -> Iterable[Any]:
        """Notes how to restore one object. Returns those that it knows."""
        if isinstance(x, partial):
            return [x.func, *x.args, *x.keywords.values()]
        if isinstance(x, MethodType):
            return [x.__self__, x.__func__]
        if isinstance(x, FunctionType):
            return self._known_by(x) if is_of_program(x.__module__) else []
        if type(x) in COLLECTIONS and len(x) <= MOST:
            self.undos.append(partial(refill, x, content := x.copy()))
            return _entries(content)
        if isinstance(x, tuple):
            return x
        if isinstance(x, Tensor):
            self._tensor(x)
            if is_of_program(type(x).__module__):  # a weight that hands what it holds to an object of its module
                return self._attributes(x, vars(x).__setitem__, vars(x).__delitem__)
        elif isinstance(x, torch.Generator):
            self.undos.append(partial(x.set_state, x.get_state()))
        elif isinstance(x, type):
            return self._attributes(x, partial(setattr, x), partial(delattr, x)) if is_of_program(x.__module__) else []
        elif is_of_program(file_of(x)) or file_of(x).startswith("torch.nn.modules."):
            return self._object(x)
        return []

    def _object(self, x: Any) -> Iterable[Any]:
        if id(x) in self.of_model:  # its own values are restored, but not those of objects in its attributes
            return [value for name, value in vars(x).items() if name not in TORCHS_OWN and not _is_state(value)]
        own = getattr(x, "__dict__", None)
        return [type(x)] if own is None else [type(x), *self._attributes(x, own.__setitem__, own.__delitem__)]

    def _known_by(self, function: FunctionType) -> list[Any]:
        cells = [cell for cell in function.__closure__ or () if cell != CellType()]
        for cell in cells:
            if isinstance(cell.cell_contents, PLAIN):
                self.undos.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
        names = [name for name in _names(function.__code__) if name in function.__globals__]
        for name in names:
            if isinstance(value := function.__globals__[name], PLAIN):
                self.undos.append(partial(function.__globals__.__setitem__, name, value))
        found = [cell.cell_contents for cell in cells] + [function.__globals__[name] for name in names]
        return [*found, *(function.__defaults__ or ())]

    def _tensor(self, x: Tensor) -> None:
        if x.requires_grad or x.numel() > MOST or x.is_inference() or type(x) is not Tensor or x.is_meta:
            return
        version, value = x._version, x.clone()

        def undo() -> None:
            if x._version != version:
                with torch.no_grad():
                    (x if x.shape == value.shape else x.resize_(value.shape)).copy_(value)

        self.undos.append(undo)

    def _attributes(self, x: Any, put: Callable[[str, Any], Any], drop: Callable[[str], Any]) -> list[Any]:
        """Notes how to restore the attributes of an object by ``put`` and ``drop``. Returns their values."""
        before = dict(vars(x))

        def undo() -> None:
            now = dict(vars(x))
            for name, value in before.items():
                if _is_state(value) and (name not in now or now[name] is not value):
                    put(name, value)
            for name, value in now.items():
                if name not in before and _is_state(value):
                    drop(name)

        self.undos.append(undo)
        return list(before.values())


def refill(collection: Any, content: Any) -> None:
    """Gives a collection its content back; does nothing if it has it, since other threads may read it."""
    now, before = _entries(collection), _entries(content)
    if len(now) != len(before) or not all(map(operator.is_, now, before)):
        collection.clear()
        collection.update(content) if isinstance(collection, (dict, set)) else collection.extend(content)


def _entries(collection: Any) -> list[Any]:
    return [*collection, *collection.values()] if isinstance(collection, dict) else list(collection)


def _is_state(value: Any) -> bool:
    return isinstance(value, PLAIN) or type(value) in COLLECTIONS


def _names(code: CodeType) -> Iterator[str]:
    """The global names that a function's code uses, and those of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@cache
def is_of_program(name: str | None) -> bool:
    """Returns True for a module of the program: none of this package, of Python's own, or of installed packages.

    A module that is not imported is the program's, too.

    Packages may be installed anywhere (``pip install --target``): beside them pip puts their metadata.
    """
    root = (name or "").partition(".")[0]
    if root == "__main__" or (root and root not in sys.modules):  # as code that a program ran by exec()
        return True
    module = sys.modules.get(root)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    place = next((place for place in places if place is not None), None)
    if place is None or root == __name__.partition(".")[0]:
        return False
    paths = sysconfig.get_paths()
    installed = paths["stdlib"], paths["purelib"], paths["platlib"], site.getusersitepackages(), *site.getsitepackages()
    package = Path(place).parent if Path(place).name == "__init__.py" else Path(place)
    return not (str(place).startswith(installed) or any(package.parent.glob("*.dist-info")))
