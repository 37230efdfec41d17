"""One rank's share of a batch, cut from whole rows: the inputs of the model, and the context that they belong to."""

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
    """What one rank holds of a batch."""

    inputs: dict[str, Any]
    context: BatchContext


def share(batch: Mapping[str, Any], ring: Ring, config: RingConfig, late: bool) -> Share:
    """This rank's share of a batch that all ranks know to be the same, so nothing is compared.

    Args:
        late: it has no images, but is cut where a batch with images would be.
    """
    tokens = tokens_of(batch)
    whole = whole_rows(batch, tokens, Layout(tokens.shape[1], ring.size, ring.rank), config, late)
    return cut(batch, whole, ring, config)


def cut(
    batch: Mapping[str, Any], whole: WholeBatch, ring: Ring, config: RingConfig, count_as_number: bool = True
) -> Share:
    """This rank's share of whole rows.

    Args:
        count_as_number: num_items_in_batch becomes a Python number. FSDP2 in 16 bits casts every floating tensor that a
            model is called with: of 1250 tokens it makes 1248 in bfloat16. A tensor spares a compiler one graph.
    """
    layout, seen = whole.layout, MaskFacts() if whole.facts is None else whole.facts
    facts = BatchFacts(
        documents=seen.documents, hidden=seen.hidden, positions=seen.positions, blocks=seen.blocks,
        max_position=whole.max_position, rows=tokens_of(batch).shape[0], has_labels=whole.items is not None,
        numbered=whole.facts is not None and batch.get("position_ids") is None,
    )  # fmt: skip
    context = BatchContext(ring, layout, config, facts, TextModel() if whole.facts is None else None)
    inputs = {
        name: layout.shard(layout.pad(x, 1, PADDING.get(name, 0)), 1) if name in whole.names else x
        for name, x in whole.inputs.items()
    }
    items = whole.inputs.get("num_items_in_batch", whole.items)  # given: counted over several batches, perhaps
    if items is not None:
        number = items.item() if count_as_number and isinstance(items, Tensor) else items
        inputs["num_items_in_batch"] = number / ring.size
    inputs["use_cache"] = False
    return Share(inputs, context)
