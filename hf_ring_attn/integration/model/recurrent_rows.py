"""The rows of which a recurrent layer computes a share: an attribute of the padding mask that the layer gets.

So a checkpoint's recompute has them, too, after the batch's context was left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ... import errors
from ...layers.halo import RowShare
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..patching.compiler import uncompiled
from .recurrent_ops import BY_HOST

MASK = "create_recurrent_attention_mask"
_MARK = "_hf_ring_attn_hybrid"


def rows_in(given: Iterable[Any]) -> RowShare | None:
    """The rows that a mask among a layer's arguments carries."""
    return next((getattr(x, _MARK) for x in given if isinstance(x, Tensor) and hasattr(x, _MARK)), None)


def mark(mask: Tensor, context: BatchContext) -> Tensor:
    """Lets a mask carry the rows of a batch."""
    setattr(mask, _MARK, RowShare(context.ring, context.layout, context.facts.documents))
    return mask


def context_for_recurrence() -> BatchContext | None:
    """The sharded batch in which such layers need help: in a ring, or with several documents in a row."""
    context = batch_context.current()
    if context is None or context.before_text or (context.ring.size == 1 and context.facts.documents is None):
        return None
    return context


def refuse_cache(layer: str, given: Iterable[Any]) -> None:
    """Raises UnsupportedArgument if a layer got a cache."""
    if any(hasattr(x, "get_seq_length") for x in given):
        why = "its state would be one rank's; leave use_cache=False, as sharded.inputs has it"
        raise errors.UnsupportedArgument(layer, "a cache", why, "was called with")


def of_batch(original: Callable[..., Any]) -> Any:
    """Makes the replacement of transformers' function `MASK`."""

    @uncompiled(BY_HOST)
    def create_recurrent_attention_mask(
        config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """This rank's share of the padding mask, with the rows for its layers as an attribute."""
        context = context_for_recurrence()
        if context is None:
            mask: Tensor | None = original(config, inputs_embeds, attention_mask, *args, **kwargs)
            return mask
        rows, length = inputs_embeds.shape[:2]
        if length != context.layout.local_length:
            raise errors.UnshardedInput(length, length, context.layout.local_length, context.layout.length)
        hidden = context.facts.hidden
        real = torch.ones(rows, context.layout.padded) if hidden is None else hidden.logical_not()
        return mark(context.layout.shard(real, 1).to(inputs_embeds.device, torch.int64), context)

    return create_recurrent_attention_mask
