"""Runs a trainer's methods as a trial: sends no messages, then restores the state of the trainer and of its losses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor

from ..context.program_states import is_of_program, preserved_objects, refill

LONGEST = 1000
"""The most entries of a container that is searched: longer ones are data, which a step does not change."""


class _LocalAccelerator:
    """An `Accelerator` that sends nothing: this process's values stand for those of all processes.

    Other rings may be at another place in their program.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, value: Any) -> Any:
        # Not by `gather_for_metrics`: where it is replaced, what takes its place may call this.
        rows = value[None] if isinstance(value, Tensor) and not value.dim() else value
        return rows.repeat(self.num_processes, *[1] * (rows.dim() - 1)) if isinstance(rows, Tensor) else rows

    def gather_for_metrics(self, value: Any, *_: Any, **__: Any) -> Any:
        return value[None] if isinstance(value, Tensor) and not value.dim() else value

    def reduce(self, value: Any, *_: Any, **__: Any) -> Any:
        return value

    pad_across_processes = reduce


@contextmanager
def preserved_trainer(trainer: Any) -> Iterator[None]:
    """Restores on exit the attributes of a trainer, its state and its control, and the contents of containers."""
    restore = restoring(trainer)
    for name, x in vars(trainer).items():
        if isinstance(x, Tensor):
            vars(trainer)[name] = x.clone()
    trainer.accelerator = _LocalAccelerator(trainer.accelerator)
    try:
        with preserved_objects(_objects_of(trainer), trainer.model.modules()):
            yield
    finally:
        restore()


def restoring(trainer: Any) -> Callable[[], None]:
    """A function that restores attributes of a trainer, its state and its control, and the contents of containers."""
    objects = [trainer, *(x for name in ("state", "control") if (x := getattr(trainer, name, None)) is not None)]
    attributes = [(vars(one), dict(vars(one))) for one in objects]
    contents = [(x, x.copy()) for own, _ in attributes for value in own.values() for x in _containers(value)]

    def restore() -> None:
        for own, before in attributes:
            own.clear()
            own.update(before)
        for container, content in contents:
            refill(container, content)

    return restore


def _objects_of(trainer: Any) -> list[Any]:
    """The program's own loss functions, and its objects that the trainer holds: they may count their calls."""
    kinds = [cls for cls in type(trainer).__mro__ if is_of_program(cls.__module__)]
    losses = [vars(cls)["compute_loss"] for cls in kinds if "compute_loss" in vars(cls)]
    held = [x for x in vars(trainer).values() if is_of_program(type(x).__module__) or isinstance(x, FunctionType)]
    modules = set(map(id, trainer.model.modules()))
    return [*losses, *(x for x in held if id(x) not in modules)]


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict, set, deque)):
        yield value
        if len(value) <= LONGEST:
            for part in value.values() if isinstance(value, dict) else value:
                yield from _containers(part)
