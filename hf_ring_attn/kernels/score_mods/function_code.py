"""The code of a user's function: functions of equal code need only one trial."""

from __future__ import annotations

from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def code_of(function: Any) -> tuple[object, ...]:
    """Collects a function's code and that of what it closes over or finds by name; equal for equal code."""
    parts: list[object] = []
    seen: set[int] = set()

    def visit(x: Any) -> None:
        home = getattr(x, "__module__", None) or "builtins"
        if id(x) in seen or home.partition(".")[0] in ("builtins", "torch"):
            return
        seen.add(id(x))
        if isinstance(x, partial):
            inside = [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, MethodType):
            inside = [x.__func__, type(x.__self__)]
        elif isinstance(x, FunctionType):
            parts.append(x.__code__)
            cells = [cell.cell_contents for cell in x.__closure__ or () if cell != CellType()]
            inside = [*cells, *(x.__globals__.get(name) for name in x.__code__.co_names)]
        elif isinstance(x, type):
            parts.append(x)
            inside = [getattr(part, "__func__", part) for part in vars(x).values()]
        elif callable(x):
            inside = [type(part) for part in x.modules()] if isinstance(x, nn.Module) else [type(x)]
        else:
            return
        for part in inside:
            visit(part)

    visit(function)
    return tuple(parts)
