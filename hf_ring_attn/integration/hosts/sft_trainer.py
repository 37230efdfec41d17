"""TRL's SFTTrainer in a ring: its evaluation is sharded, too, and its metrics are sums over each ring."""

from __future__ import annotations

import functools
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from ..context import batch_context
from ..context.local_batch import MadeInputs
from ..context.whole_batch import IGNORED
from ..model import ring_calls
from ..model.experts import AuxiliaryLoss
from ..patching.changes import Original, Patch, around
from ..patching.modules import Replaced
from . import own_methods, prediction, trainer_facts
from .gather_for_metrics import gather_sums_per_ring
from .rings_as_processes import rings_as_processes

_STEPS = "current_gradient_accumulation_steps"
"""SFTTrainer's divisor of the auxiliary loss of experts, if it gets a count of tokens."""


@around
def _compute_loss(
    original: Original, self: Any, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:  # fmt: skip
    context = batch_context.current()
    if context is None:
        with rings_as_processes(self) if trainer_facts.has_ring(self) else nullcontext():
            return original(self, model, inputs, return_outputs, num_items_in_batch)
    trainer_facts.refuse_past_fused_head(self)
    one_mean = not self.model.training  # in training all batches of a step have one mean
    is_part = own_methods.LOSS_OF_RANK in vars(self)
    made = {**context.state(MadeInputs), **inputs}
    if num_items_in_batch is None and (count := made.get("num_items_in_batch")) is not None:
        # For a model with accepts_loss_kwargs=False, and for a subclass that leaves the count out: SFTTrainer would
        # divide by this rank's count of labels.
        num_items_in_batch, one_mean, is_part = count * _multiplied(self), True, True
    accelerator, tokens = self.accelerator, self._total_train_tokens
    # SFTTrainer clamps a count to at least 1, so it gets the whole count, and its loss is multiplied here.
    shared = num_items_in_batch is not None and not self.args.average_tokens_across_devices
    times = context.ring.size if shared else 1
    context.state(AuxiliaryLoss).factor = 1 / times
    count = num_items_in_batch * times if shared and is_part else num_items_in_batch
    with ExitStack() as replaced:
        if context.ring.size > 1:  # entropy and accuracy are sums over tokens, and a ring's tokens are one row's
            gather = functools.partial(gather_sums_per_ring, accelerator)
            replaced.enter_context(Replaced(accelerator, "gather_for_metrics", gather))
        if one_mean:  # then the trainer divides the whole loss, or nothing, by the batches of a step
            replaced.enter_context(Replaced(self, _STEPS, 1))
        result = original(self, model, inputs, return_outputs, count)
    if self.model.training and getattr(self, "_is_vlm", True):
        _count_tokens(self, inputs, context, tokens)
    if self.aux_loss_enabled:  # no sum: each rank has that of the whole row
        self._metrics["train" if self.model.training else "eval"]["aux_loss"][-1] *= times / context.ring.size
    loss = ring_calls.with_value_of_batch((result[0] if return_outputs else result) * times, context)
    return (loss, result[1]) if return_outputs else loss


def _count_tokens(sft: Any, inputs: dict[str, Any], context: batch_context.BatchContext, before: int) -> None:
    """Counts a batch's tokens once for each ring. ``before``: the count before this batch."""
    mask = inputs.get("attention_mask")
    counted = int(mask.sum()) if mask is not None else inputs["position_ids"].size(1)
    # With images each rank has whole rows; other rings' batches may have none.
    mine = counted if context.text is None or context.ring.rank == 0 else 0
    of_all = sft.accelerator.gather(torch.tensor(mine, device=sft.accelerator.device))
    sft._total_train_tokens = before + int(of_all.sum())
    sft._metrics["train"]["num_tokens"] = [sft._total_train_tokens]


def _predict(sft: Any, *given: Any) -> Any:
    # SFTTrainer ignores label_names: it always has labels, and a loss.
    return prediction.predict(sft, *given, count=_count_of_ring, names=["labels"], only="logits")


def _count_of_ring(sft: Any, inputs: dict[str, Any]) -> Any:
    """The count for an evaluation: SFTTrainer's mean is over one data-parallel rank's tokens, here over one ring's.

    It cancels SFTTrainer's multiplication by the number of processes.
    """
    labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][..., 1:]
    averaged = sft.args.average_tokens_across_devices
    return labels.ne(IGNORED).sum() * (_multiplied(sft) / sft.get_cp_size() if averaged else 1)


def _multiplied(sft: Any) -> int:
    """SFTTrainer's factor of a loss that it divided by a count of tokens."""
    return int(sft.accelerator.num_processes) if sft.args.average_tokens_across_devices else 1


SFT = "trl.trainer.sft_trainer:SFTTrainer"
PATCHES = [
    Patch(f"{SFT}.compute_loss", "(self, model, inputs, return_outputs=, num_items_in_batch=)", _compute_loss),
    prediction.patch_prediction(SFT, prediction.predicting(_predict)),
]
