"""Losses that each rank can compute its share of: those of causal language models, and any on gathered logits."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForSequenceClassificationLoss

from ... import errors
from ..context.batch_context import BatchContext
from ..context.introspect import class_of, head_of


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    if context.ring.size == 1:
        return
    if LOSS_MAPPING.get(str(getattr(head_of(model), "loss_type", None))) is ForSequenceClassificationLoss:
        yield "it classifies a sequence by one token, which each rank would look for among its own"


def prepare(model: nn.Module, context: BatchContext) -> None:
    """Refuses a loss that is known not to be a sum over tokens; what a forward makes of it, the self-check sees.

    Raises:
        LossNotSharded: labels make the model compute another loss than a causal language model's.
    """
    head = head_of(model)
    if head is None or not context.facts.has_labels or context.ring.size == 1:
        return
    # transformers falls back to the causal loss where it knows no loss of that name (GPT2LMHeadModel, say).
    if LOSS_MAPPING.get(str(head.loss_type), ForCausalLMLoss) is not ForCausalLMLoss:
        raise errors.LossNotSharded(f"the loss of {type(head).__name__}, which is no causal language model's,")
    function = head.loss_function  # transformers' own, unless somebody set another one, or the class has its own
    if not context.keeps_labels and function is not ForCausalLMLoss:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise errors.LossNotSharded(f"the loss of {class_of(head)}, whose loss_function is {name},", gathers=True)
