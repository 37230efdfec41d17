"""Restores what a forward on the side changes: in a model, and outside, where a program's hooks and forwards write to.

The self-check runs them on its own row. What they counted or collected then would be in the program's first step.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..context import ring_random
from ..context.program_states import PLAIN, TORCHS_OWN, is_of_program, preserved_objects, refill
from ..log import warn
from ..patching.modules import HOOKS, hooks_of, is_ours

BYTES_COPIED = 1 << 22
"""The largest buffers that the run gets as copies; larger ones (tables of RoPE, of masks) are only watched."""

_HOOKS = itemgetter(
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
CONSTANT = {bool, int, float, str, type(None)}
"""The types of most attributes. With adapters a model has thousands of modules, and each run restores all of them."""
_PLAIN = (bool, int, float, str, type(None), Tensor, list, tuple, dict, set)


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Sets ``model`` to eval mode, without compiling, a graph or garbage collection, and restores it on exit.

    Restored: training flags, random generators, buffers, tensors and plain values in attributes of modules (the
    frequencies of dynamic RoPE, caches, counters), hooks (transformers notes in such a value that it set its own), and
    what a program's hooks and forwards write to elsewhere. Modes are set by flags: some modules override `eval()` to
    merge weights.
    """
    with ExitStack() as stack:
        stack.enter_context(ring_random.preserved())
        if gc.isenabled():  # the kernels that a first forward imports make many objects: a search takes half a second
            gc.disable()
            stack.callback(gc.enable)
        stack.enter_context(torch.no_grad())
        # torch before 2.13 would use casts made without a graph in the step that follows.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(_computed_anew())
        if "torch._dynamo" in sys.modules:  # else nothing was compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        modules = list(model.modules())
        stack.enter_context(restored(modules))
        stack.enter_context(preserved_objects(holders(modules), modules))
        for module in modules:
            module.__dict__["training"] = False
        yield


@contextmanager
def _computed_anew() -> Iterator[None]:
    """Computes parametrized weights anew: inside `parametrize.cached()` the program's step would get the run's ones."""
    before = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = before


@contextmanager
def restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restores on exit what a forward changes in modules."""
    attributes = [dict(module.__dict__) for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    hooks = [(table, set(table)) for own in attributes for table in _HOOKS(own)]
    contents: list[tuple[Any, Any]] = []
    copies: dict[int, Tensor] = {}
    watched: list[tuple[str, Tensor, int]] = []

    def copied(name: str, x: Tensor) -> Tensor:
        if x.is_inference():  # it cannot be written to
            return x
        if x.is_meta or x.numel() * x.element_size() > BYTES_COPIED or type(x) is not Tensor:
            watched.append((name, x, x._version))
            return x
        return copies.setdefault(id(x), x.clone())

    for module, own, held in zip(modules, attributes, buffers, strict=True):
        for name, buffer in held.items():
            if buffer is not None:
                module._buffers[name] = copied(f"{type(module).__name__}.{name}", buffer)
        for name, x in own.items():
            if type(x) in CONSTANT or name in TORCHS_OWN:
                continue
            if type(x) in (list, dict, set):
                contents.append((x, x.copy()))
            elif isinstance(x, Tensor) and not isinstance(x, nn.Parameter):
                module.__dict__[name] = copied(f"{type(module).__name__}.{name}", x)
    try:
        yield
    finally:
        for module, own, held in zip(modules, attributes, buffers, strict=True):
            _put_back(module, own, held)
        for table, known in hooks:
            for number in table.keys() - known if table else ():
                del table[number]
        for container, content in contents:
            refill(container, content)
        for name, x, version in watched:
            if x._version != version:
                warn(f"the self-check's row wrote to {name}, which was too large to copy and restore.")


def _put_back(module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Any]) -> None:
    """Gives a module its attributes and buffers back. States that a forward has made since are deleted."""
    now = module.__dict__
    if now.keys() != attributes.keys():
        for name in [name for name, x in now.items() if name not in attributes and _is_state(x)]:
            del now[name]
    now.update(attributes)
    if module._buffers or buffers:
        module._buffers.clear()
        module._buffers.update(buffers)


def _is_state(x: object) -> bool:
    """Returns True for an attribute that a forward may make anew: a plain value, or an object of the program."""
    return isinstance(x, _PLAIN) or is_of_program(type(x).__module__)


# ---- outside of modules ----


def holders(modules: Sequence[nn.Module]) -> list[Any]:
    """The hooks and the forwards of ``modules``, and what else may hold objects of the program that these change."""
    return [*programs_hooks(modules), *_held_by(modules)]


def programs_hooks(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The program's hooks on modules, on their weights and on all modules, and the forwards set on modules."""
    tables = [getattr(torch.nn.modules.module, f"_global{kind}") for kind in HOOKS]
    for module in modules:
        yield from hooks_of(module)
        tables += [x._backward_hooks for x in module._parameters.values() if x is not None and x._backward_hooks]
    yield from (hook for table in tables for hook in table.values() if not is_ours(hook))


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
