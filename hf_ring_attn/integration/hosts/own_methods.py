"""A trainer's own methods that see whole rows, on every rank of a ring: they run as in one process for each ring.

A training_step may call models with the whole rows that it has, so these calls are sharded. What Trainer's own step
calls is sharded before.

Multiply a loss of one rank's tokens by the number of processes, since gradients are averaged, and a loss of whole rows
by the number of rings. So methods of whole rows have an accelerator that counts rings. Counts of tokens are those of
one process, but in a loss of one rank's tokens (`LOSS_OF_RANK`).
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from transformers import Trainer

from ... import errors
from ..batch.loss_graph import refuse_past_outputs
from ..context import batch_context
from ..patching.changes import Original
from ..patching.modules import Replaced
from .program_methods import is_own, stand_in
from .rings_as_processes import (
    RingsAsProcesses,
    RingsCounted,
    counting_rings,
    processes_counted,
    rings_as_processes,
)
from .trainer_overrides import SHARDS_CALLS

LOSS_OF_RANK = "_hf_ring_attn_loss_of_rank"
"""The attribute of a trainer in a loss of the program's own of a rank's tokens. There a count of tokens that is not
averaged over devices is a rank's part, so that the mean of the ranks' losses is the loss of their ring."""
COUNT = "num_items_in_batch"

_steps_by_itself: weakref.WeakSet[Any] = weakref.WeakSet()
"""Trainers whose own training_step does not call Trainer's."""


@contextmanager
def as_ranks(trainer: Any) -> Iterator[None]:
    """Restores the numbers of processes and of tokens for a host's method that one of the program's calls."""
    with processes_counted(trainer), ExitStack() as stack:
        for name in (LOSS_OF_RANK, SHARDS_CALLS):
            if name in vars(trainer):
                stack.callback(vars(trainer).__setitem__, name, vars(trainer).pop(name))
        yield


def wrap_own_methods(trainer: Any, group: Any) -> None:
    """Lets a sampler of the program's own, its compute_loss and evaluations count rings where no batch is sharded.

    Args:
        group: of the ring.
    """
    if group is None:
        return
    for name, run in RUNS.items():
        if is_own(trainer, name):
            stand_in(trainer, name, run)


Calls = Callable[[Any, Any], AbstractContextManager[Any]]
"""Makes the context of a trainer and a model in which the model's calls are sharded."""


def shard_calls(trainer: Any, calls: Calls) -> None:
    """Lets a training_step of the program's own call models with whole rows."""
    if is_own(trainer, "training_step"):
        stand_in(trainer, "training_step", functools.partial(_training_step, calls))


def _compute_loss(method: Original, trainer: Any, *given: Any, **named: Any) -> Any:
    context, shards_calls = batch_context.current(), SHARDS_CALLS in vars(trainer)
    is_sharded = context is not None and not context.whole_head and not shards_calls
    if is_sharded or (isinstance(trainer.accelerator, RingsCounted) and not shards_calls):
        try:
            if context is None or trainer.args.average_tokens_across_devices:  # then the count is of all processes
                return method(*given, **named)
            given, named = _of_rank(method, given, named, context.ring.size)
            with Replaced(trainer, LOSS_OF_RANK, True):
                return method(*given, **named)
        except errors.Refused as error:
            error.in_loss = True
            raise
    with rings_as_processes(trainer):
        result = method(*given, **named)
    if shards_calls:
        refuse_past_outputs(result[0] if isinstance(result, tuple) else result)
    return result


RUNS: dict[str, Original] = {
    **dict.fromkeys(("evaluate", "evaluation_loop", "prediction_step"), counting_rings()),
    "_get_train_sampler": counting_rings(of_arguments=RingsAsProcesses),  # it may deal out rows by both numbers
    "compute_loss": _compute_loss,
}
"""The functions that call a program's own methods, by name."""


def _of_rank(method: Original, given: tuple[Any, ...], named: dict[str, Any], size: int) -> tuple[Any, Any]:
    """Arguments of a compute_loss, with a rank's part of the ring's count of tokens."""
    places = [*inspect.signature(method).parameters]
    if COUNT not in places:  # it has *args
        places = [*inspect.signature(Trainer.compute_loss).parameters][1:]
    if named.get(COUNT) is not None:
        named = {**named, COUNT: named[COUNT] / size}
    elif COUNT in places[: len(given)] and given[at := places.index(COUNT)] is not None:
        given = (*given[:at], given[at] / size, *given[at + 1 :])
    return given, named


def _training_step(calls: Calls, method: Original, trainer: Any, *given: Any, **named: Any) -> Any:
    _steps_by_itself.add(trainer)  # until Trainer's own is called
    with rings_as_processes(trainer), calls(trainer, given[0] if given else named["model"]):
        return method(*given, **named)


def hosts_step(trainer: Any, call: Callable[[], Any]) -> Any:
    """Calls Trainer's own training_step, perhaps from one of the program's."""
    _steps_by_itself.discard(trainer)
    with as_ranks(trainer):
        return call()


def steps_by_itself(trainer: Any) -> bool:
    """Returns True if the program's own training_step trains on whole rows, by a compute_loss of its own."""
    return trainer in _steps_by_itself and is_own(trainer, "compute_loss")
