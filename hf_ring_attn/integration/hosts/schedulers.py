"""Steps of schedulers that accelerate prepared, per batch of a ring.

accelerate steps a scheduler once per process. Programs that follow its rule multiply their numbers of steps by
accelerator.num_processes, and their scheduler steps once per process here, too. Others count batches, and step once per
ring. The numbers in a scheduler decide: with cp_size > 1, num_processes is a `ProcessCount`, and so are its multiples.

A share of a multiple, as a warmup of int(steps * ratio), counts as a multiple if it is one by value: then it is that
many times the share of one process.

Not detected: a number of processes from elsewhere (torch.distributed, an environment variable), and a product with a
float on the left. Such a scheduler counts batches, and a log line at its first step says so.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from accelerate.state import AcceleratorState, PartialState

from ... import errors
from ..context import batch_context
from ..context.mesh import ring_enabled
from ..log import say
from ..patching.changes import Original, Patch, around


class ProcessCount(int):
    """A number of processes, or a result of integer arithmetic with one."""

    lost = False
    """True if a program converted a count to a plain number. Schedulers made later may use it."""
    shares: ClassVar[set[int]] = set()
    """Whole numbers that a program made of a `ShareOfCount`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int.__int__(self),)


class ShareOfCount(float):
    """A product of a `ProcessCount` and a float, as of a number of steps and a ratio of warmup."""

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(repr(self)),)


def _multiply(self: int, other: Any) -> Any:
    found = int.__mul__(self, other)
    if type(found) is int:
        return ProcessCount(found)
    return ShareOfCount(float(int.__int__(self)) * other) if type(other) is float else found


def _count(found: Any) -> Any:
    return ProcessCount(found) if type(found) is int else found


def _lose(found: Any) -> Any:
    caller = str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0]
    # Schedulers of libraries compute with floats. This package counts rings, and makes no scheduler's numbers.
    if caller not in {"torch", "transformers", "accelerate", "hf_ring_attn"}:
        ProcessCount.lost = True
    return found


def _share(found: Any) -> Any:
    ProcessCount.shares.update([found] if type(found) is int else [])
    return found


def _define(kind: type, names: str, then: Callable[[Any], Any]) -> None:
    """Defines operations of a kind of number: ``then`` gets what the plain number's operation returns."""
    for name in (f"__{name}__" for name in names.split()):
        plain = getattr(kind.__base__, name)
        setattr(kind, name, lambda self, *others, plain=plain: then(plain(self, *others)))


_define(ProcessCount, "rmul add radd sub rsub floordiv ceil floor round trunc pos", _count)
_define(ProcessCount, "int float truediv", _lose)
_define(ShareOfCount, "int ceil floor round trunc", _share)
setattr(ProcessCount, "__mul__", _multiply)  # noqa: B010  mypy takes no assignment to a method


def _write_as_plain_numbers() -> None:
    """Lets yaml, which asks for the exact class, write a `ProcessCount` as it writes an int."""
    yaml = sys.modules.get("yaml")  # accelerate imports it
    if yaml is None:
        return
    plain = yaml.representer.SafeRepresenter
    dumpers = [getattr(yaml, name, plain) for name in ("SafeDumper", "Dumper", "CSafeDumper", "CDumper")]
    for representer in (plain, yaml.representer.Representer, *dumpers):  # each may have a table of its own
        representer.add_representer(ProcessCount, plain.represent_int)
        representer.add_representer(ShareOfCount, plain.represent_float)


def mark_process_counts(state: Any) -> None:
    """Turns num_processes of an `AcceleratorState`, and of its `PartialState`, into a `ProcessCount`."""
    ProcessCount.lost = False
    ProcessCount.shares.clear()
    _write_as_plain_numbers()
    for values in (PartialState._shared_state, vars(state)):
        values["num_processes"] = ProcessCount(int.__int__(values["num_processes"]))


_NO_STEPS = {"last_epoch", "_step_count", "optimizer", "verbose", "T_cur", "T_mult", "num_cycles", "power"}
"""Attributes of a scheduler that hold no numbers of steps."""
_SCHEDULERS = "torch.optim.lr_scheduler"


def _numbers(x: Any, seen: dict[int, Any]) -> Iterator[int]:
    """Yields the step numbers in a scheduler, in nested ones, and in the functions that it calls.

    Args:
        seen: objects by identity, which it keeps alive: Python gives the memory of a dead one to the next.
    """
    if isinstance(x, int) and not isinstance(x, bool):
        yield x
    if isinstance(x, int | float | str) or x is None or id(x) in seen:
        return
    seen[id(x)] = x
    parts: list[Any] = []
    if isinstance(x, Mapping):  # MultiStepLR counts its milestones
        parts = [*x.values()] if all(isinstance(name, str) for name in x) else [*x]
    elif isinstance(x, list | tuple):
        parts = [*x]
    elif isinstance(x, functools.partial):
        parts = [*x.args, _steps_of(x.keywords)]
    elif inspect.isfunction(x):
        holds = inspect.getclosurevars(x)
        globals_ = {name: value for name, value in holds.globals.items() if isinstance(value, int | float)}
        parts = [
            _steps_of(holds.nonlocals),
            _steps_of(globals_),
            x.__defaults__,
            _steps_of(x.__kwdefaults__ or {}),
        ]
    elif inspect.ismethod(x):
        parts = [x.__self__]
    elif (callable(x) and not inspect.isclass(x)) or any(kind.__module__ == _SCHEDULERS for kind in type(x).__mro__):
        parts = [_steps_of(getattr(x, "__dict__", {}))]
    for part in parts:
        yield from _numbers(part, seen)


def _steps_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The named values that may be numbers of steps."""
    return {name: value for name, value in values.items() if name not in _NO_STEPS}


def _is_multiple(number: int, count: int) -> bool:
    return isinstance(number, ProcessCount) or (number in ProcessCount.shares and number % count == 0)


_LOST_BEFORE: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""By prepared scheduler: True if a count became a plain number before. Later ones cannot be in the scheduler."""
_READ: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def counts_processes(prepared: Any) -> bool:
    """Returns True if a prepared scheduler's numbers of steps are multiples of the number of processes. Read once.

    Raises:
        UnclearScheduler: some numbers of steps are multiples and others are not, or a multiple was converted.
    """
    if prepared not in _READ:
        numbers = [number for number in _numbers(prepared.scheduler, {}) if number > 0]
        count = int.__int__(AcceleratorState().num_processes)
        multiples = [number for number in numbers if _is_multiple(number, count)]
        others = [number for number in numbers if not _is_multiple(number, count)]
        if multiples and others:
            what = "was not" if others[0] not in ProcessCount.shares else f"is no whole multiple of {count}"
            raise errors.UnclearScheduler(f"{multiples[0]} was computed from it, and {others[0]} {what}")
        if numbers and not multiples and _LOST_BEFORE.get(prepared, ProcessCount.lost):
            raise errors.UnclearScheduler("a multiple of it became a plain number, perhaps this scheduler's")
        _READ[prepared] = bool(multiples)
        own = vars(prepared.scheduler)  # plain numbers from here on, since checkpoints save them
        own.update({name: int.__int__(x) for name, x in own.items() if isinstance(x, ProcessCount)})
    return _READ[prepared]


_COUNTS_RINGS = (
    "a scheduler that accelerate prepared steps {0} for each batch, once for each ring: its numbers of steps are not "
    "multiples of accelerator.num_processes, which is {1}"
)
_COUNTS_PROCESSES = (
    "a scheduler that accelerate prepared steps {0} times for each batch, once for each process, since accelerate "
    "does not know of the ring. If its number of steps is not multiplied by accelerator.num_processes, give "
    'Accelerator a ParallelismConfig(cp_size=..., cp_backend="ring"), or leave the scheduler out of prepare()'
)


@around
def _scheduler_made(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    _LOST_BEFORE[self] = ProcessCount.lost


@around
def _scheduler_step(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    state = AcceleratorState()
    config, linked = state.parallelism_config, self.step_with_optimizer and self.gradient_state.sync_gradients
    each = linked and not self.split_batches  # accelerate would step once per process
    if not ring_enabled(config):
        if each and state.num_processes > 1 and batch_context.live_batches():
            say(_COUNTS_PROCESSES.format(state.num_processes))
        original(self, *args, **kwargs)
    elif linked and self.split_batches:
        for _ in range(state.num_processes if counts_processes(self) else 1):
            original(self, *args, **kwargs)
    elif not each or counts_processes(self):
        original(self, *args, **kwargs)
    elif not any(optimizer.step_was_skipped for optimizer in self.optimizers):
        rings = state.num_processes // config.cp_size
        say(_COUNTS_RINGS.format("once" if rings == 1 else f"{rings} times", state.num_processes))
        for _ in range(rings):
            last = getattr(self.scheduler, "total_steps", None)  # OneCycleLR's, as in accelerate
            if last is None or self.scheduler._step_count <= last:
                self.scheduler.step(*args, **kwargs)


_SCHEDULER = "accelerate.scheduler:AcceleratedScheduler"
PATCHES = (
    Patch(
        f"{_SCHEDULER}.__init__", "(self, scheduler, optimizers, step_with_optimizer=, split_batches=)", _scheduler_made
    ),
    Patch(f"{_SCHEDULER}.step", "(self, *args, **kwargs)", _scheduler_step),
)
