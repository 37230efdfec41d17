"""Shards whole rows: one rank's inputs of the model, and their batch context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm.ring import Ring
from ...config import RingConfig
from ...sharding.layout import Layout
from .batch_context import BatchContext, BatchFacts, TextModel
from .tracked_input import TrackedInput
from .whole_batch import OF_HEADS, MaskFacts, WholeBatch, padding_of, read_batch, tokens_of


class MadeInputs(dict[str, Any]):
    """The inputs of one rank that the batch lacked, and that were made for it.

    Of this rank also ``labels`` and ``shifted``, which the count belongs to, and the padding ``mask`` and position ids
    (``places``) of which the model makes its attention masks; ``whole_shifted``: shifted labels of whole rows;
    ``ids``: input_ids of this rank and of whole rows.
    """

    labels = shifted = mask = places = TrackedInput.of(None)
    whole_shifted: Tensor | None = None
    ids: tuple[Tensor | None, Tensor | None] = None, None


CACHE = "use_cache"
MADE = ("position_ids", "attention_mask", "shift_labels", "num_items_in_batch", CACHE)
"""Inputs that are made for a batch that lacks them, and that a program for one process does not know of. Recurrent
layers refuse a cache, which most models make unless they are told not to."""


class LocalBatch(NamedTuple):
    """This rank's part of a batch: the model's inputs, and their context."""

    inputs: dict[str, Any]
    context: BatchContext


def local_batch(batch: Mapping[str, Any], ring: Ring, config: RingConfig, text: TextModel | None) -> LocalBatch:
    """Shards a batch known to be the same on all ranks. ``text``: at the input of a model like this one."""
    tokens = tokens_of(batch)
    layout, head = Layout(tokens.shape[1], ring.size, ring.rank), text is not None and text.gathers
    whole = read_batch(batch, tokens, layout, config, text is not None, head)
    return cut_batch(batch, whole, ring, config)


def cut_batch(
    batch: Mapping[str, Any], whole: WholeBatch, ring: Ring, config: RingConfig, count_as_number: bool = True
) -> LocalBatch:
    """Shards whole rows. ``count_as_number``: make num_items_in_batch a Python number (see `fsdp.uncast`)."""
    layout, seen = whole.layout, MaskFacts() if whole.facts is None else whole.facts
    facts = BatchFacts(
        **vars(seen), max_position=whole.max_position, rows=whole.rows,
        has_labels=whole.items is not None or (whole.head and not batch.keys().isdisjoint(OF_HEADS)),
        numbered=whole.facts is not None and batch.get("position_ids") is None,
    )  # fmt: skip
    text = TextModel(gathers=whole.head) if whole.facts is None else None
    context = BatchContext(ring, layout, config, facts, text)
    inputs = {**whole.inputs, **_local_rows({name: whole.inputs[name] for name in whole.names}, layout)}
    items = whole.inputs.get("num_items_in_batch", whole.items)  # if given, it may count several batches
    if items is not None and not whole.head:  # a head of whole rows divides by the whole count
        number = items.item() if count_as_number and isinstance(items, Tensor) else items
        inputs["num_items_in_batch"] = number / ring.size
    inputs[CACHE] = False
    made = context.state(MadeInputs)
    if whole.head:  # its call gets whole rows, of which nothing is made
        made.update({CACHE: False} if batch.get(CACHE) is None else {})
    else:
        made.update({name: inputs[name] for name in MADE if name in inputs and batch.get(name) is None})
        made.labels, made.shifted = TrackedInput.of(inputs.get("labels")), TrackedInput.of(inputs.get("shift_labels"))
        made.whole_shifted = whole.inputs.get("shift_labels")
        made.ids = inputs.get("input_ids"), whole.inputs.get("input_ids")
        if whole.facts is not None:  # else they are not cut yet
            made.mask, made.places = (TrackedInput.of(inputs.get(name)) for name in ("attention_mask", "position_ids"))
    return LocalBatch(inputs, context)


def _local_rows(rows: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Pads rows [B, S, ...] and takes this rank's tokens; all rows [B, S] of one dtype at once."""
    padded = {name: layout.pad(x, 1, padding_of(name, x)) for name, x in rows.items()}
    alike: dict[object, list[str]] = {}
    for name, x in padded.items():
        together = layout.world_size > 1 and x.dim() == 2 and not x.is_floating_point()
        alike.setdefault((x.dtype, x.device) if together else name, []).append(name)
    shares: dict[str, Tensor] = {}
    for names in alike.values():
        if len(names) == 1:
            shares[names[0]] = layout.shard(padded[names[0]], 1)
        else:  # copied apart: views would share a version counter, by which `call_inputs` sees a write
            cut_rows = layout.shard(torch.stack([padded[name] for name in names]), 2)
            each: Any = torch.unbind_copy(cut_rows)  # type: ignore[func-returns-value]  # a mistake of torch's stubs
            shares.update(zip(names, each, strict=True))
    return shares
