"""A trainer's own methods that see whole rows, on every rank of a ring: they run as in one process for each ring.

A training_step may call models with the whole rows that it has, so these calls are sharded. What Trainer's own step
calls is sharded before.

The loss of a rank's tokens times the number of processes is right, since gradients are averaged. Of whole rows it is
the number of rings. So a method of whole rows has an accelerator that counts rings, and counts of tokens of its ring.
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
from ..patching.modules import Replaced
from .program_methods import Given, Named, is_own, stand_in
from .rings_as_processes import RingsAsProcesses, RingsCounted, processes_counted, rings_as_processes
from .trainer_overrides import BY_CALLS

OF_RINGS = "_hf_ring_attn_of_rings"
"""The attribute of a trainer in a method whose counts of tokens are those of its ring."""
COUNT = "num_items_in_batch"
EVALUATIONS = ("evaluate", "evaluation_loop", "prediction_step")
SAMPLER = "_get_train_sampler"

_steps_by_itself: weakref.WeakSet[Any] = weakref.WeakSet()
"""Trainers whose own training_step does not call Trainer's."""


@contextmanager
def as_one_process(trainer: Any) -> Iterator[None]:
    """Lets a method of a trainer run as in one process for each ring."""
    with rings_as_processes(trainer), Replaced(trainer, OF_RINGS, True):
        yield


@contextmanager
def as_ranks(trainer: Any) -> Iterator[None]:
    """Lets a host's method run on each rank as by itself, though one of the program's calls it."""
    with processes_counted(trainer), ExitStack() as stack:
        for name in (OF_RINGS, BY_CALLS):
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
    for name in (*EVALUATIONS, SAMPLER):
        if is_own(trainer, name):
            stand_in(trainer, name, _sample if name == SAMPLER else _evaluate)
    if is_own(trainer, "compute_loss"):
        stand_in(trainer, "compute_loss", functools.partial(_compute_loss, group.size()))


def shard_calls(trainer: Any, calls: Callable[[Any, Any], AbstractContextManager[Any]], size: int) -> None:
    """Lets a training_step of the program's own call models with whole rows.

    Args:
        calls: makes the context of a trainer and a model in which its calls are sharded. size: of the ring.
    """
    if is_own(trainer, "training_step"):
        stand_in(trainer, "training_step", functools.partial(_training_step, size, calls))


def _evaluate(trainer: Any, method: Callable[..., Any], given: Given, named: Named) -> Any:
    with as_one_process(trainer):
        return method(*given, **named)


def _sample(trainer: Any, method: Callable[..., Any], given: Given, named: Named) -> Any:
    with rings_as_processes(trainer, of_arguments=RingsAsProcesses):  # it may deal out rows by both numbers
        return method(*given, **named)


def _compute_loss(size: int, trainer: Any, method: Callable[..., Any], given: Given, named: Named) -> Any:
    context, by_calls = batch_context.current(), BY_CALLS in vars(trainer)
    is_sharded = context is not None and not context.whole_head and not by_calls
    is_trial = isinstance(trainer.accelerator, RingsCounted) and not by_calls
    if is_sharded or is_trial or OF_RINGS in vars(trainer):
        try:
            return method(*given, **named)
        except errors.Refused as error:
            error.in_loss = True
            raise
    given, named = _of_ring(trainer, "compute_loss", method, given, named, size)
    with as_one_process(trainer):
        result = method(*given, **named)
    if by_calls:
        refuse_past_outputs(result[0] if isinstance(result, tuple) else result)
    return result


def _training_step(
    size: int, calls: Callable[[Any, Any], AbstractContextManager[Any]], trainer: Any, method: Callable[..., Any],
    given: Given, named: Named,
) -> Any:  # fmt: skip
    given, named = _of_ring(trainer, "training_step", method, given, named, size)
    _steps_by_itself.add(trainer)  # until Trainer's own is called
    with as_one_process(trainer), calls(trainer, given[0] if given else named["model"]):
        return method(*given, **named)


def _of_ring(
    trainer: Any, name: str, method: Callable[..., Any], given: Given, named: Named, size: int
) -> tuple[Given, Named]:
    """Arguments of a trainer's ``method``, called ``name``, with the ring's count of tokens, not a rank's part."""
    if trainer.args.average_tokens_across_devices:  # the count is that of all ranks
        return given, named
    places = [*inspect.signature(method).parameters]
    if COUNT not in places:  # it has *args
        places = [*inspect.signature(getattr(Trainer, name)).parameters][1:]
    if named.get(COUNT) is not None:
        named = {**named, COUNT: named[COUNT] * size}
    elif COUNT in places[: len(given)] and given[at := places.index(COUNT)] is not None:
        given = (*given[:at], given[at] * size, *given[at + 1 :])
    return given, named


def hosts_step(trainer: Any, call: Callable[[Any], Any], count: Any, size: int) -> Any:
    """Calls Trainer's own training_step with its count of tokens, perhaps from one of the program's."""
    _steps_by_itself.discard(trainer)
    if OF_RINGS in vars(trainer) and count is not None and not trainer.args.average_tokens_across_devices:
        count = count / size
    with as_ranks(trainer):
        return call(count)


def steps_by_itself(trainer: Any) -> bool:
    """Returns True if the program's own training_step trains on whole rows, by a compute_loss of its own."""
    return trainer in _steps_by_itself and is_own(trainer, "compute_loss")
