"""Refuses trainers by their class, or by a method that no trial step can judge."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from ... import errors

OF_TRL = {"SFTTrainer", "_BaseTrainer"}
"""TRL's trainers with a sum over tokens as their loss. The others compare whole sequences, or models."""
COUNTS = ("get_batch_samples", "_get_num_items_in_batch", "_prepare_context_parallel_inputs")
"""Methods that define a loss's divisor and a rank's inputs. Other overrides get whole rows, or are tried."""


def refuse_unknown(trainer: Any) -> None:
    """Refuses TRL's trainers except SFTTrainer, and trainers that override `COUNTS`, unless ``ring_fp32_exact``.

    Raises:
        UnsupportedTrainer, UnknownTrainer.
    """
    kind = type(trainer)
    for cls in kind.__mro__:
        if cls.__module__.partition(".")[0] == "trl" and issubclass(cls, Trainer) and cls.__name__ not in OF_TRL:
            raise errors.UnsupportedTrainer(cls.__name__)
    if getattr(trainer, "ring_fp32_exact", False):
        return
    for method in COUNTS:
        if method in vars(trainer):
            raise errors.UnknownTrainer(kind.__name__, f"the trainer's own {method}")
        if getattr(kind, method) is not getattr(Trainer, method):
            place = next(cls.__qualname__ for cls in kind.__mro__ if method in vars(cls))
            raise errors.UnknownTrainer(kind.__name__, f"{place}.{method}")
