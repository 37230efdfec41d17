"""Restores what a program's hooks write to, as collections of activations: see `context.program_states`.

The self-check runs a program's hooks on its own row. What they wrote then would count in the program's first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..context.program_states import preserved_objects
from ..patching.hooks import is_ours

KINDS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


@contextmanager
def preserved_states(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores on exit what the hooks of ``modules``, and forwards that a program replaced, changed inside."""
    known = list(modules)
    with preserved_objects([hook for hook in _hooks_of(known) if not is_ours(hook)], known):
        yield


def _hooks_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The hooks of modules, the forwards set on them, and the hooks set for all modules."""
    for module in modules:
        for kind in KINDS:
            yield from module.__dict__[kind].values()
        if "forward" in module.__dict__:
            yield module.__dict__["forward"]
    for kind in KINDS:
        yield from getattr(torch.nn.modules.module, f"_global{kind}").values()
