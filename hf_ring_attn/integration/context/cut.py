"""Shards whole rows: one rank's inputs of the model, and their batch context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ...comm.ring import Ring
from ...config import RingConfig
from ...sharding.layout import Layout
from .batch_context import BatchContext, BatchFacts, TextModel
from .whole_batch import PADDING, MaskFacts, WholeBatch, tokens_of, whole_rows


class Share(NamedTuple):
    """One rank's shard of a batch."""

    inputs: dict[str, Any]
    context: BatchContext


def share(batch: Mapping[str, Any], ring: Ring, config: RingConfig, late: bool) -> Share:
    """Shards a batch known to be the same on all ranks, without comparing it.

    Args:
        late: shard it at the text model's input, as a batch with images, though it has none.
    """
    tokens = tokens_of(batch)
    whole = whole_rows(batch, tokens, Layout(tokens.shape[1], ring.size, ring.rank), config, late)
    return cut(batch, whole, ring, config)


def cut(
    batch: Mapping[str, Any], whole: WholeBatch, ring: Ring, config: RingConfig, count_as_number: bool = True
) -> Share:
    """Shards whole rows.

    Args:
        count_as_number: make num_items_in_batch a Python number. FSDP2 in 16 bits casts every floating input, so 1250
            becomes 1248 in bfloat16. A tensor saves a compiler one graph.
    """
    layout, seen = whole.layout, MaskFacts() if whole.facts is None else whole.facts
    facts = BatchFacts(
        **vars(seen), max_position=whole.max_position, rows=tokens_of(batch).shape[0],
        has_labels=whole.items is not None,
        numbered=whole.facts is not None and batch.get("position_ids") is None,
    )  # fmt: skip
    context = BatchContext(ring, layout, config, facts, TextModel() if whole.facts is None else None)
    inputs = {
        name: layout.shard(layout.pad(x, 1, PADDING.get(name, 0)), 1) if name in whole.names else x
        for name, x in whole.inputs.items()
    }
    items = whole.inputs.get("num_items_in_batch", whole.items)  # if given, it may count several batches
    if items is not None:
        number = items.item() if count_as_number and isinstance(items, Tensor) else items
        inputs["num_items_in_batch"] = number / ring.size
    inputs["use_cache"] = False
    return Share(inputs, context)
