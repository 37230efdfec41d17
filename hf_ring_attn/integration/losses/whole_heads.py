"""Heads that get whole rows: the model below a head computes this rank's tokens, and its hidden states are gathered.

So a head's own code pools (the last token, the first, a mean), and its own loss sees whole rows and their labels:
classes of rows and of tokens, spans, masked tokens. One tensor [B, S, D] travels, forward and backward. Every rank
computes the head and its loss, with the same random numbers, so the mean of gradients over ranks is right. Of a loss
over a vocabulary each rank computes a part of the tokens (`lazy_logits`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.loss.loss_utils import (
    LOSS_MAPPING,
    ForMaskedLMLoss,
    ForQuestionAnsweringLoss,
    ForSequenceClassificationLoss,
    ForTokenClassification,
)

from ... import errors
from ...layers.collectives import gather_sequence
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.introspect import inside, loss_model_of, parameters_of
from ..context.whole_batch import OF_HEADS
from ..patching.compiler import uncompiled
from ..patching.modules import attach

OF_TOKENS = (ForTokenClassification, ForMaskedLMLoss)
OF_ROWS = (ForSequenceClassificationLoss, ForQuestionAnsweringLoss)
"""The losses of transformers' heads that get whole rows: of tokens' own labels, and of whole rows."""
_UNNAMED = "ForPreTraining"
"""In names of classes whose loss is of tokens' own labels and of a row's, which transformers' table does not name."""
_BY_HOST = "hf_ring_attn gathers hidden states"


def body_of(model: nn.Module) -> Any:
    """The model below a head that gets whole rows; None for other models."""
    head: Any = loss_model_of(model)
    kind = LOSS_MAPPING.get(str(getattr(head, "loss_type", None)))
    is_unnamed = kind is None and any(_UNNAMED in one.__name__ for one in type(head).__mro__)
    if not is_unnamed and kind not in (*OF_TOKENS, *OF_ROWS):
        return None
    body = getattr(head, "base_model", head)
    return None if body is head else body


def needs_whole_rows(model: object, batch: object) -> bool:
    """Returns True if the head of ``model`` gets whole rows in a loop: one of rows, or any with labels."""
    if not isinstance(model, nn.Module) or not isinstance(batch, Mapping) or body_of(model) is None:
        return False
    return has_labels_of_rows(model) or any(batch.get(name) is not None for name in OF_HEADS)


def has_labels_of_rows(model: nn.Module) -> bool:
    """Returns True for a head whose labels are of rows, not of tokens, whatever their shape."""
    return LOSS_MAPPING.get(str(getattr(loss_model_of(model), "loss_type", None))) in OF_ROWS


def prepare(model: nn.Module, context: BatchContext) -> None:
    """Gives a pooler whole rows where a base model's outputs are gathered."""
    if context.gathers_logits:
        inner: Any = inside(model)
        prepare_pooler(getattr(inner, "base_model", inner))


def prepare_pooler(body: Any) -> None:
    """Hooks a pooler inside ``body`` (BERT's), which reads a token of the whole row."""
    if isinstance(pooler := getattr(body, "pooler", None), nn.Module):
        attach(pooler, "whole rows", _gather_inputs)


def inputs_taken(body: nn.Module, local: dict[str, Any]) -> dict[str, Any]:
    """The inputs in ``local`` that the forward of ``body`` takes.

    Raises:
        UnsupportedModel: it takes no position_ids, so each rank would number its own tokens from 0.
    """
    names = parameters_of(body, local)
    if "position_ids" not in names:
        why = "its forward takes no position_ids, so each rank would number its own tokens from 0"
        raise errors.UnsupportedModel(type(body).__name__, [why])
    return {name: x for name, x in local.items() if name in names}


@uncompiled(_BY_HOST)
def gather_hidden_states(x: Any, context: BatchContext) -> Any:
    """Gathers the hidden states [B, T, ...] in an output of the body to those of whole rows [B, S, ...]."""
    if isinstance(x, Tensor):
        is_share = x.dim() > 2 and x.shape[:2] == context.local_shape
        return gather_sequence(x, context.ring, context.layout) if is_share else x
    if isinstance(x, Mapping):
        fields: Any = {name: gather_hidden_states(part, context) for name, part in x.items()}
        return type(x)(**fields)
    if type(x) in (tuple, list):
        return type(x)(gather_hidden_states(part, context) for part in x)
    return x


def _gather_inputs(_pooler: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = batch_context.current()
    if context is None or not (context.whole_head or context.gathers_logits) or context.before_text:
        return None
    return gather_hidden_states(args, context), {name: gather_hidden_states(x, context) for name, x in kwargs.items()}
