"""Restores what a forward on the side changes in a model."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from ..log import warn
from ..patching.hooks import is_ours

BYTES_COPIED = 1 << 22
"""The largest buffers that the run gets as copies; larger ones (tables of RoPE, of masks) are only watched."""

_OWN = frozenset(nn.Module().__dict__)
"""torch's own attributes of every module, parameters among them: FSDP2 exchanges them in a forward."""
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
_MOST = 1 << 16
"""The most entries of a collection that is restored."""
_EMPTY = CellType()
_HOSTS = {"torch", "transformers", "accelerate", "peft"}
"""Packages whose hooks keep states of their own, as FSDP2's do."""
_PLAIN = (bool, int, float, str, type(None), Tensor, list, tuple, dict, set)


@contextmanager
def preserved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Sets ``model`` to eval mode, without compiling and without a graph, and restores it on exit.

    Restored: training flags, random generators, buffers, tensors and plain values in attributes of modules (the
    frequencies of dynamic RoPE, caches, counters), hooks (transformers notes in such a value that it set its own), and
    the collections in which a program's hooks collect activations. Other writes of its hooks stay. Modes are set by
    flags: some modules override `eval()` to merge weights.
    """
    with ExitStack() as stack:
        devices = [device.index or 0] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.no_grad())
        # torch before 2.13 would use casts made without a graph in the step that follows.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        if "torch._dynamo" in sys.modules:  # else nothing was compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_restored(model))
        for module in model.modules():
            module.__dict__["training"] = False
        yield


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    contents = [
        (x, x.copy())
        for own in attributes
        for name, x in own.items()
        if name not in _OWN and type(x) in (list, dict, set)
    ]
    contents += [(x, x.copy()) for x in _collections_of_hooks(modules)]
    hooks = [(module.__dict__[name], set(module.__dict__[name])) for module in modules for name in _HOOKS]
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
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter):
                module.__dict__[name] = copied(f"{type(module).__name__}.{name}", x)
    try:
        yield
    finally:
        for module, own, held in zip(modules, attributes, buffers, strict=True):
            now = module.__dict__
            for name in [name for name, x in now.items() if name not in own and isinstance(x, _PLAIN)]:
                del now[name]
            now.update(own)
            module._buffers.clear()
            module._buffers.update(held)
        for set_hooks, known in hooks:
            for number in [number for number in set_hooks if number not in known]:
                del set_hooks[number]
        for container, content in contents:
            container.clear()
            container.update(content) if isinstance(container, (dict, set)) else container.extend(content)
        for name, x, version in watched:
            if x._version != version:
                warn(f"the self-check's row wrote to {name}, which was too large to copy and restore.")


def _collections_of_hooks(modules: Iterable[nn.Module]) -> list[Any]:
    """The lists, dicts, sets and deques that a program's hooks, and forwards that it replaced, may write to."""
    found: dict[int, Any] = {}
    for module in modules:
        hooks = [hook for name in ("_forward_hooks", "_forward_pre_hooks") for hook in module.__dict__[name].values()]
        for hook in (*hooks, module.__dict__.get("forward")):
            if hook is not None and not is_ours(hook):
                for x in filter(_is_collection, _reached_by(hook)):
                    found[id(x)] = x
                    inner = x.values() if isinstance(x, dict) else x  # such as a list for each layer
                    found.update((id(part), part) for part in filter(_is_collection, inner))
    return list(found.values())


def _is_collection(x: Any) -> bool:
    return isinstance(x, (list, dict, set, deque)) and len(x) <= _MOST


def _reached_by(function: Any) -> Iterator[Any]:
    """The objects that a program's function knows: by its arguments, object, closure, and names of its module."""
    while isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):  # an object that can be called
        owner, function = function, type(function).__call__
    if not hasattr(function, "__code__") or function.__module__.partition(".")[0] in _HOSTS:
        return
    if owner is not None and not isinstance(owner, nn.Module):  # modules are restored anyway
        yield from getattr(owner, "__dict__", {}).values()
    yield from (cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY)
    yield from (function.__globals__.get(name) for name in function.__code__.co_names)
    yield from function.__defaults__ or ()
