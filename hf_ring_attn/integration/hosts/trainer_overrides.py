"""Which trainers' way from a batch to a loss is known to be exact in a ring, as it was written and as it is now."""

from __future__ import annotations

from typing import Any

from ... import errors
from ..patching.code_origin import strangers

UNDERSTOOD = {
    "transformers.trainer.Trainer",
    "trl.trainer.sft_trainer.SFTTrainer",
    "trl.trainer.base_trainer._BaseTrainer",
}
"""Classes whose way from a batch to a loss is known to be exact in a ring."""
STEPS = (
    "compute_loss", "training_step", "prediction_step", "evaluation_loop", "get_batch_samples",
    "_get_num_items_in_batch", "_prepare_context_parallel_inputs",
)  # fmt: skip
"""The methods on that way. One that is overridden or replaced is refused, unless ``ring_fp32_exact = True`` is said."""


def refuse_unknown(trainer: Any) -> None:
    """Refuses a trainer with a step that is not known: a subclass's, or one set on the trainer or on a known class.

    Raises:
        UnknownTrainer: unless the attribute ``ring_fp32_exact`` is true where the step is, or below: what a parent
            says, it says of itself.
    """
    for method in STEPS:
        for place in (trainer, *type(trainer).__mro__):
            own = vars(place)
            if own.get("ring_fp32_exact", False):
                break
            if method not in own:
                continue
            known = isinstance(place, type) and f"{place.__module__}.{place.__qualname__}" in UNDERSTOOD
            if known and not strangers(own[method]):
                continue
            where = f"{place.__qualname__}.{method}" if isinstance(place, type) else f"the trainer's own {method}"
            if known or place is trainer:
                where = f"{getattr(own[method], '__qualname__', type(own[method]).__name__)}, set as {where}"
            raise errors.UnknownTrainer(type(trainer).__name__, where)
