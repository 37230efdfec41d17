"""A trainer's own methods that see whole rows, on every rank of a ring: training_step, and the compute_loss it calls.

A training_step may call models with the whole rows that it has, so these calls are sharded. What Trainer's own step
calls is sharded before.

The loss of a rank's tokens times the number of processes is right, since gradients are averaged. Of whole rows it is
the number of rings: so that is what a compute_loss sees there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..batch.whole_outputs import refuse_past_outputs
from ..context import batch_context
from .rings_as_processes import RingsCounted, rings_as_processes
from .trainer_overrides import BY_CALLS

_ours: weakref.WeakSet[Any] = weakref.WeakSet()
"""The functions made here. Not an attribute of them: a program's own wrapper would copy it."""


def count_rings(trainer: Any, group: Any) -> None:
    """Lets a compute_loss of the program's own count rings where no batch is sharded. ``group``: of the ring."""
    kind = type(trainer)
    is_known = kind.compute_loss.__module__.startswith(("transformers.", "trl."))
    if group is None or is_known or "compute_loss" in vars(trainer):
        return
    of: Any = weakref.ref(trainer)  # else each would keep the other alive

    @functools.wraps(kind.compute_loss)
    def compute_loss(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **named: Any
    ) -> Any:
        host = of()
        call = functools.partial(kind.compute_loss, host, model, inputs, return_outputs)
        is_trial = isinstance(host.accelerator, RingsCounted) and BY_CALLS not in vars(host)
        if batch_context.current() is not None or is_trial:
            return call(num_items_in_batch, **named)
        if num_items_in_batch is not None and not host.args.average_tokens_across_devices:
            num_items_in_batch = num_items_in_batch * group.size()  # a rank's part
        with rings_as_processes(host, RingsCounted):
            result = call(num_items_in_batch, **named)
        if BY_CALLS in vars(host):
            refuse_past_outputs(result[0] if return_outputs else result)
        return result

    _ours.add(compute_loss)
    trainer.compute_loss = compute_loss


def shard_calls(trainer: Any, calls: Callable[[Any, Any], AbstractContextManager[Any]]) -> None:
    """Lets a training_step of the program's own run in a context. ``calls``: makes it for a trainer and a model."""
    own = vars(trainer).get("training_step")
    if own in _ours or not is_own(trainer, "training_step"):
        return
    of: Any = weakref.ref(trainer)
    kind = type(trainer)

    @functools.wraps(kind.training_step if own is None else own)
    def training_step(model: Any, *given: Any, **named: Any) -> Any:
        host = of()
        with calls(host, model):
            return kind.training_step(host, model, *given, **named) if own is None else own(model, *given, **named)

    _ours.add(training_step)
    trainer.training_step = training_step


def is_own(one: Any, method: str) -> bool:
    """Returns True if ``one`` has this method from the program, not from its host."""
    place = next((cls for cls in type(one).__mro__ if method in vars(cls)), None)
    return method in vars(one) or (place is not None and not place.__module__.startswith(HOSTS))


HOSTS = ("transformers.", "trl.", "hf_ring_attn.")


def set_by_program(trainer: Any) -> Any:
    """The compute_loss that a program set on the trainer itself; None if it set none."""
    own = vars(trainer).get("compute_loss")
    return None if own in _ours else own
