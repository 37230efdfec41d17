"""The rows of which a layer beside attention computes a share: the mask that the layer gets carries them.

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
from ..context.batch_context import MaskSpec
from ..patching.compiler import uncompiled
from .recurrent_ops import BY_HOST

MASK = "create_recurrent_attention_mask"
_MARK = "_hf_ring_attn_hybrid"
_GIVEN = "_hf_ring_attn_hybrid_given"
_MIXED = (
    "a checkpoint recomputes it with a mask that batches of other documents or lengths had, too: make another mask for "
    "each batch, or train without checkpointing"
)


def rows_in(given: Iterable[Any]) -> RowShare | None:
    """The rows that a mask among a layer's arguments carries."""
    for x in given:
        rows = rows_in(x.values()) if isinstance(x, dict) else _carried(x)
        if rows is not None:
            return rows
    return None


def _carried(x: Any) -> RowShare | None:
    if isinstance(x, MaskSpec):
        return x.rows
    rows: RowShare | None = getattr(x, _MARK, None) if isinstance(x, Tensor) else None
    return rows


def mark(mask: Tensor, rows: RowShare) -> Tensor:
    """Lets a mask carry rows."""
    setattr(mask, _MARK, rows)
    return mask


def note_given(mask: Tensor, rows: RowShare) -> None:
    """Notes the rows with which a layer got a program's own mask, for a recompute: the program may keep the mask, and
    use it in other batches, and outside of any."""
    before = getattr(mask, _GIVEN, rows)
    setattr(mask, _GIVEN, rows if before is not None and have_same_documents(before, rows) else None)


def rows_given(layer: str, given: Iterable[Any]) -> RowShare | None:
    """The rows with which a layer got a program's own mask.

    Raises:
        UnsupportedModel: there were several.
    """
    noted = [getattr(x, _GIVEN) for x in given if isinstance(x, Tensor) and hasattr(x, _GIVEN)]
    if None in noted:
        raise errors.UnsupportedModel(layer, [_MIXED])
    return noted[0] if noted else None


def have_same_documents(a: RowShare, b: RowShare) -> bool:
    """Returns True for rows that are cut alike."""
    return (a.ring, a.layout, a.count) == (b.ring, b.layout, b.count) and a.pieces == b.pieces


def rows_of_batch() -> RowShare | None:
    """The rows of the current batch if such layers need help: in a ring, or with several documents in a row."""
    context = batch_context.current()
    return None if context is None else context.row_share


def refuse_cache(layer: str, given: Iterable[Any]) -> None:
    """Raises UnsupportedArgument if a layer got a cache."""
    if any(hasattr(x, "get_seq_length") for x in given):
        why = "its state would be one rank's; leave use_cache=False, as sharded.inputs has it"
        raise errors.UnsupportedArgument(layer, "a cache", why, "was called with")


def make_mask_function(original: Callable[..., Any]) -> Any:
    """Makes the replacement of transformers' function `MASK`."""

    @uncompiled(BY_HOST)
    def create_recurrent_attention_mask(
        config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """This rank's share of the padding mask, with the rows for its layers as an attribute."""
        context, share = batch_context.current(), rows_of_batch()
        if context is None or share is None:
            mask: Tensor | None = original(config, inputs_embeds, attention_mask, *args, **kwargs)
            return mask
        rows, length = inputs_embeds.shape[:2]
        if length != context.layout.local_length:
            raise errors.UnshardedInput(length, length, context.layout.local_length, context.layout.length)
        hidden = context.facts.hidden
        real = torch.ones(rows, context.layout.padded) if hidden is None else hidden.logical_not()
        return mark(context.layout.shard(real, 1).to(inputs_embeds.device, torch.int64), share)

    return create_recurrent_attention_mask
