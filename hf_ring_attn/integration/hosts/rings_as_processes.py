"""Counts rings in place of processes, for hosts that give each process rows of its own.

Ranks of a ring hold the same rows. A host that numbers processes, or gathers a value from each, sees one for each ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate.utils.operations import recursively_apply
from torch import Tensor

from ... import errors
from ...comm.ring import world_rank, world_size
from ..context import ring_random
from ..context.mesh import ring_enabled, ring_of_process
from ..patching.changes import Original, around
from ..patching.modules import Replaced

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rings: rings.sum(0),
    "mean": lambda rings: rings.mean(0),
    "max": lambda rings: rings.amax(0),
}  # accelerate sums for "none", too, which its documentation calls no operation


class RingsCounted:
    """An `Accelerator`, or its state, whose number of processes is that of rings; the rest is as before."""

    def __init__(self, accelerator: Any, ring_size: int | None = None) -> None:
        self._accelerator = accelerator
        self.ring_size = int(accelerator.parallelism_config.cp_size) if ring_size is None else ring_size

    def __getattr__(self, name: str) -> Any:
        if name == "_accelerator":  # while a copy is made
            raise AttributeError(name)
        return getattr(self._accelerator, name)

    def __reduce__(self) -> Any:
        return _itself, (self._accelerator,)  # saved arguments have the state itself

    @property
    def of_processes(self) -> Any:
        """The accelerator itself."""
        return self._accelerator

    @property
    def num_processes(self) -> int:
        return int(self._accelerator.num_processes) // self.ring_size


def _itself(one: Any) -> Any:
    return one


class RingsAsProcesses(RingsCounted):
    """An `Accelerator` whose processes are the rings. Each ring's value is that of its first rank."""

    @property
    def process_index(self) -> int:
        return int(self._accelerator.process_index) // self.ring_size  # "cp" is the innermost axis of the mesh

    def gather(self, tensor: Any) -> Any:
        """Gathers nested tensors [n, ...] (a scalar is taken as [1]) of each ring: [rings * n, ...]."""
        return once_per_ring(self._accelerator.gather(tensor), self.ring_size)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces nested tensors [...] over rings, in their dtypes. As in accelerate, ``scale`` is for XLA only.

        Raises:
            UnsupportedArgument: the reduction is not "sum", "mean" or "max".
        """
        if reduction not in _REDUCTIONS:
            raise errors.UnsupportedArgument(
                "Accelerator.reduce", f"reduction={reduction!r}", f"in a ring it may be {', '.join(_REDUCTIONS)}", "got"
            )

        def reduced(part: Tensor) -> Tensor:
            return _REDUCTIONS[reduction](self.gather(part[None])).to(part.dtype)

        return recursively_apply(reduced, tensor, error_on_other_type=True)


@contextmanager
def rings_as_processes(
    trainer: Any, kind: type[RingsCounted] = RingsAsProcesses, of_arguments: type[RingsCounted] = RingsCounted
) -> Iterator[None]:
    """Lets a trainer count rings in place of processes, or, with `RingsCounted`, know their number alone.

    Without rings these are the processes.

    Args:
        of_arguments: the same for its arguments' ``world_size`` and ``process_index``. By default the latter stays,
            since it decides who writes files.
    """
    accelerator, arguments = trainer.accelerator, getattr(trainer, "args", None)  # a client of vLLM has none
    if isinstance(accelerator, RingsCounted) or not ring_enabled(accelerator.parallelism_config):
        yield
        return
    with ExitStack() as stack:
        counted = kind(accelerator)
        stack.enter_context(Replaced(trainer, "accelerator", counted))
        state = getattr(arguments, STATE, None)
        if state is not None and not isinstance(state, RingsCounted):  # trainers may share their arguments
            stack.enter_context(Replaced(arguments, STATE, of_arguments(state, counted.ring_size)))
        if state is not None:  # by it Trainer divides the arguments' number
            stack.enter_context(Replaced(trainer, CP_SIZE, _one))
        yield


def counting_rings(**kinds: type[RingsCounted]) -> Original:
    """For `program_methods.stand_in`: runs a method in `rings_as_processes` with these ``kinds``."""

    def run(method: Original, trainer: Any, *given: Any, **named: Any) -> Any:
        with rings_as_processes(trainer, **kinds):
            return method(*given, **named)

    return run


@contextmanager
def processes_counted(trainer: Any) -> Iterator[None]:
    """Lets a trainer count processes again."""
    with ExitStack() as stack:
        for owner, name in ((trainer, "accelerator"), (getattr(trainer, "args", None), STATE)):
            one = getattr(owner, name, None)
            if isinstance(one, RingsCounted):
                stack.enter_context(Replaced(owner, name, one.of_processes))
        if vars(trainer).get(CP_SIZE) is _one:
            stack.callback(vars(trainer).__setitem__, CP_SIZE, vars(trainer).pop(CP_SIZE))
        yield


def _one() -> int:
    return 1


STATE = "distributed_state"
"""The attribute of TrainingArguments with the number of processes."""
CP_SIZE = "get_cp_size"
"""Trainer's method that returns the size of a ring."""


def once_per_ring(everyone: Any, ring_size: int) -> Any:
    """Takes each ring's first rank's rows out of those [ranks * n, ...] of all ranks, in nested tensors."""
    rings = world_size() // ring_size

    def first_ranks(tensor: Tensor) -> Tensor:
        ranks = tensor.view(rings, ring_size, len(tensor) // (rings * ring_size), *tensor.shape[1:])
        return ranks[:, 0].flatten(0, 1)

    return recursively_apply(first_ranks, everyone, error_on_other_type=True)


# ---- functions that a host's module imports from accelerate and from TRL ---------------------------------------------


@around
def gather(original: Original, tensor: Any) -> Any:
    """Patches `gather` of tensors."""
    size = ring_of_process().size
    return original(tensor) if size == 1 else once_per_ring(original(tensor), size)


@around
def gather_object(original: Original, object: Any) -> Any:  # noqa: A002  the original's name
    """Patches `gather_object` of lists."""
    size = ring_of_process().size
    if size == 1:
        return original(object)
    return [x for values in original([object])[::size] for x in values]


@around
def set_seed(original: Original, seed: int, device_specific: bool = False, deterministic: bool = False) -> Any:
    """Patches `set_seed`: ring n's first rank gets the seed of process n, the other ranks get seeds of their own."""
    ring = ring_of_process()
    if ring.size > 1 and device_specific:
        process = world_rank()
        seed, device_specific = seed + (process + world_size() if ring.rank else process // ring.size), False
    return original(seed, device_specific, deterministic)


@around
def shuffle(original: Original, seq_dict: Any) -> Any:
    """Patches `shuffle_sequence_dict`: ranks of a ring shuffle their rows alike."""
    with ring_random.as_first_rank(ring_of_process()):
        return original(seq_dict)
