"""Gradients between the batches of an accumulated step, where a program's own code may use them.

Trainer lets DDP and FSDP2 average after a step's last batch, so before that each rank has the gradients of its tokens.
A program that clips them there, or moves along them, has those of whole rows in one process.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

HOSTS = ("transformers.", "trl.", "hf_ring_attn.")


def average_each_batch(trainer: Any) -> None:
    """Averages gradients after each batch, for trainers that run code between batches. The sum is the same."""
    callbacks = trainer.callback_handler.callbacks
    if _is_own(trainer, "training_step") or any(_is_own(one, "on_substep_end") for one in callbacks):
        trainer.accelerator.no_sync = lambda model=None: nullcontext()


def _is_own(one: Any, method: str) -> bool:
    """Returns True if ``one`` has this method from the program, not from its host."""
    place = next((cls for cls in type(one).__mro__ if method in vars(cls)), None)
    return method in vars(one) or (place is not None and not place.__module__.startswith(HOSTS))
