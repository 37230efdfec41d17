"""Restores what a program's hooks and forwards write to outside of modules: see `context.program_states`.

The self-check runs them on its own row. What they counted or collected then would be in the program's first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..context.program_states import PLAIN, TORCHS_OWN, is_of_program, preserved_objects
from ..patching.modules import is_ours

KINDS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


@contextmanager
def preserved_states(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores on exit what the hooks and the forwards of ``modules`` changed inside, in other objects than these."""
    known = list(modules)
    hooks = [hook for hook in hooks_of(known) if not is_ours(hook)]
    with preserved_objects([*hooks, *_held_by(known)], known):
        yield


def hooks_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The hooks of modules and of their weights, the forwards set on them, and the hooks set for all modules."""
    for module in modules:
        for kind in KINDS:
            yield from module.__dict__[kind].values()
        for weight in module._parameters.values():
            if weight is not None and weight._backward_hooks:
                yield from weight._backward_hooks.values()
        if "forward" in module.__dict__:
            yield module.__dict__["forward"]
    for kind in KINDS:
        yield from getattr(torch.nn.modules.module, f"_global{kind}").values()


def _held_by(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """A program's classes among those of modules, its weights of classes of its own, and the objects in modules'
    attributes that `restore` leaves out."""
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    yield from (kind for kind in kinds if is_of_program(kind.__module__))
    for module in modules:
        yield from (x for x in module._parameters.values() if x is not None and is_of_program(type(x).__module__))
        for name, x in module.__dict__.items():
            if name in TORCHS_OWN or isinstance(x, PLAIN):
                continue
            parts = x.values() if type(x) is dict else x
            if type(x) not in (list, dict, set) or not all(isinstance(part, PLAIN) for part in parts):
                yield x
