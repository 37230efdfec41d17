"""Losses that ranks can share: those of causal language models, and any on gathered logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForSequenceClassificationLoss

from ... import errors
from ..context.batch_context import BatchContext
from ..context.introspect import class_of, loss_models_of
from ..patching.modules import programs_own
from .whole_heads import body_of


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields a reason for models that classify sequences."""
    if context.ring.size == 1 or context.whole_head:
        return
    kinds = [LOSS_MAPPING.get(str(head.loss_type)) for head in loss_models_of(model)]
    if ForSequenceClassificationLoss in kinds:
        todo = "train it with transformers.Trainer, or shard for it: hf_ring_attn.shard(batch, model=model)"
        yield f"it classifies a sequence by one token, which each rank would choose among its own; {todo}"


def refuse_unshared(model: nn.Module, context: BatchContext) -> None:
    """Raises LossNotSharded, or UnnamedModel, if labels make the model compute another loss than a causal one.

    A forward may compute another loss all the same: the self-check tries it.
    """
    if not context.facts.has_labels or context.ring.size == 1 or context.whole_head:
        return
    for head in loss_models_of(model):
        _check(model, head, context)


def are_causal(model: nn.Module) -> bool:
    """Returns True if labels make the model compute a causal language model's loss by transformers' own function."""
    return all(programs_own(head.loss_function) is ForCausalLMLoss for head in loss_models_of(model))


def has_own_function(model: nn.Module) -> bool:
    """Returns True if a causal language model has a loss function of the program's own."""
    causal = [head for head in loss_models_of(model) if _kind(head) is ForCausalLMLoss]
    return any(programs_own(head.loss_function) is not ForCausalLMLoss for head in causal)


def _kind(head: Any) -> Any:
    # transformers uses the causal loss for names that it does not know (as of GPT2LMHeadModel).
    return LOSS_MAPPING.get(str(head.loss_type), ForCausalLMLoss)


def _check(model: nn.Module, head: Any, context: BatchContext) -> None:
    if body_of(model) is not None:
        raise errors.UnnamedModel(class_of(head))
    if _kind(head) is not ForCausalLMLoss:
        raise errors.LossNotSharded(f"the loss of {class_of(head)}, which is no causal language model's,")
    function = programs_own(head.loss_function)  # a user or a class may replace it
    if not context.gathers_logits and function is not ForCausalLMLoss:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise errors.LossNotSharded(f"the loss of {class_of(head)}, whose loss_function is {name},", gathers=True)
