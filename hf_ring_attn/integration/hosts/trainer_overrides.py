"""Refuses trainers by their class, or by a method that no trial step can judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import Trainer

from ... import errors
from ..patching.changes import installed

EXACT_TRL = {
    "trl.trainer.base_trainer:_BaseTrainer", "trl.trainer.sft_trainer:SFTTrainer",
    "trl.trainer.dpo_trainer:DPOTrainer", "trl.trainer.kto_trainer:KTOTrainer",
    "trl.trainer.reward_trainer:RewardTrainer",
    "trl.trainer.grpo_trainer:GRPOTrainer", "trl.trainer.rloo_trainer:RLOOTrainer",
}  # fmt: skip
"""TRL's trainers that are exact in a ring. Others have the same names."""
COUNTS = ("get_batch_samples", "_get_num_items_in_batch")
"""Methods that count the tokens a loss is divided by. Overrides are refused."""


def refuse_unknown(trainer: Any, methods: Sequence[str] = COUNTS) -> None:
    """Refuses TRL's trainers except those of `EXACT_TRL`, and overrides of ``methods``, unless ``ring_fp32_exact``.

    Raises:
        UnsupportedTrainer, UnknownTrainer.
    """
    kind = type(trainer)
    for cls in kind.__mro__:
        is_known = f"{cls.__module__}:{cls.__name__}" in EXACT_TRL
        if cls.__module__.partition(".")[0] == "trl" and issubclass(cls, Trainer) and not is_known:
            alike = any(one.endswith(f":{cls.__name__}") for one in EXACT_TRL)
            raise errors.UnsupportedTrainer(f"{cls.__module__}.{cls.__name__}" if alike else cls.__name__)
    if getattr(trainer, "ring_fp32_exact", False):
        return
    for method in methods:
        if method in vars(trainer):
            raise errors.UnknownTrainer(kind.__name__, f"the trainer's own {method}")
        place = next(cls for cls in kind.__mro__ if method in vars(cls))
        ours = f"{place.__module__}:{place.__qualname__}.{method}" in installed()
        if getattr(kind, method) is not getattr(Trainer, method, None) and not ours:
            raise errors.UnknownTrainer(kind.__name__, f"{place.__qualname__}.{method}")
