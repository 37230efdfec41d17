"""Overrides of methods that see one process's rows: they count rings, and a ring takes what its first rank returns.

An override may number or gather rows before and after it calls super(). Inside, its trainer's accelerator and
accelerate's functions count rings, as in TRL's own methods, and all ranks of a ring draw the same random numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import accelerate.utils
from accelerate.utils import operations, send_to_device

from ..context import ring_random
from ..context.mesh import ring_of_process
from ..patching.changes import Original, has_patch
from ..patching.modules import Replaced
from . import rings_as_processes as rings
from .program_methods import refuse_set_on, stand_in

FUNCTIONS: dict[str, Callable[..., Any]] = {"gather": rings.gather, "gather_object": rings.gather_object}


def wrap_overrides(trainer: Any, methods: tuple[str, ...]) -> None:
    """Lets overrides of ``methods`` in a trainer's class run once for each ring.

    Raises:
        UnknownTrainer: a method was set on the trainer itself.
    """
    for method in methods:
        refuse_set_on(trainer, method)
        if _overrides(type(trainer), method):
            stand_in(trainer, method, functools.partial(_once_for_each_ring, method))


def _once_for_each_ring(name: str, method: Original, trainer: Any, *given: Any, **named: Any) -> Any:
    if ring_of_process().size == 1:
        return method(*given, **named)
    with ExitStack() as stack:
        stack.enter_context(rings.rings_as_processes(trainer))
        for replaced in _functions_of_rings(type(trainer), name):
            stack.enter_context(replaced)
        return of_first_rank(trainer, name, lambda: method(*given, **named))


def of_first_rank(trainer: Any, method: str, call: Callable[[], Any]) -> Any:
    """Calls on every rank of a ring, with the same random numbers. All take what its first rank got.

    Args:
        method: the name of what is called.
    """
    ring = ring_of_process()
    with ring_random.as_first_rank(ring):
        returned = call()
    mine = send_to_device(returned, "cpu") if ring.rank == 0 else None
    first = ring.of_first(mine, f"sent what its trainer's {method} returned")
    return returned if ring.rank == 0 else send_to_device(first, trainer.accelerator.device)


def _overrides(kind: type, method: str) -> list[type]:
    """The classes that override a patched method."""
    found = [cls for cls in kind.__mro__ if method in vars(cls)]
    return found[: [has_patch(cls, method) for cls in found].index(True)]


def _functions_of_rings(kind: type, method: str) -> Iterator[Replaced]:
    """Replaces accelerate's functions where the overrides of a method find them."""
    modules = [sys.modules.get(cls.__module__) for cls in _overrides(kind, method)]
    for module in dict.fromkeys([*modules, accelerate.utils, operations]):
        for name, make in FUNCTIONS.items():
            original = vars(module).get(name)
            if original is _ACCELERATES[name]:
                yield Replaced(module, name, make(original))


_ACCELERATES = {name: getattr(operations, name) for name in FUNCTIONS}
