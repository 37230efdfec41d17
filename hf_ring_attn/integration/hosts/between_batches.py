"""Gradients and random numbers between a trainer's batches, where a program's own code may use them.

Trainer lets DDP and FSDP2 average after a step's last batch, so before that each rank has the gradients of its tokens.
A program that clips them there, or moves along them, has those of whole rows in one process.

A program may draw random numbers on one rank alone (it samples text to log). What draws for a batch (a collator) must
draw the same on all ranks, so they go on with the generators of the ring's first rank, which are one process's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ..context import ring_random
from ..context.mesh import ring_of_process
from ..patching.changes import Original, Patch
from . import uneven_batches
from .program_methods import HOSTS
from .trainer_facts import in_rings


def average_each_batch(trainer: Any) -> None:
    """Averages gradients after each batch, for trainers that run code between batches. The sum is the same."""
    if uneven_batches.runs_between_batches(trainer):
        trainer.accelerator.no_sync = lambda model=None: nullcontext()
        trainer._defer_fsdp_gradient_reduction = nullcontext  # since transformers 5.24, of models loaded sharded


@in_rings
def _get_batch_samples(original: Original, self: Any, *given: Any, **named: Any) -> Any:
    uneven_batches.refuse_training(self)
    kinds = map(type, (self, *self.callback_handler.callbacks))
    if not all(kind.__module__.startswith(HOSTS) for kind in kinds):  # it runs code of the program between batches
        ring_random.follow_first_rank(ring_of_process())
    return original(self, *given, **named)


PATCHES = (
    Patch(
        "transformers.trainer:Trainer.get_batch_samples",
        "(self, epoch_iterator, num_batches, device)",
        _get_batch_samples,
    ),
)
