"""Inputs and options that the ranks of a ring compare before they cut a batch, by names that say what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from ...config import RingConfig
from ..context.whole_batch import KERNEL_HINTS

TODO = (
    "Every rank of a ring must be given the same whole batch: with your own DataLoader, seed its "
    "shuffling and leave out a DistributedSampler over these ranks; with an IterableDataset set dispatch_batches=False."
)
_OWN_EMBEDDINGS = (
    " These inputs_embeds require a gradient, so something that trains has made them: unless the model does it, its "
    "gradients are averaged by nobody, and it differs from rank to rank after a step. Call "
    "sharded.reduce_gradients(module) with it too, after backward and before each step."
)
TOLD = (
    "labels", "shift_labels", "position_ids", "attention_mask", "block_sequence_ids", "token_type_ids",
    "mm_token_type_ids", "num_items_in_batch", "pixel_values", "pixel_values_videos", "image_grid_thw",
    "video_grid_thw", "input_features", "second_per_grid_ts", "image_sizes", "pixel_attention_mask",
)  # fmt: skip
"""Inputs that ranks compare one by one, so that the one that differs can be named."""


def empty_facts(config: RingConfig, batch: Mapping[str, Any]) -> dict[str, object]:
    """All that is compared, as many on every rank: the options, and None for what is found out later."""
    options = {f"RingConfig.{field.name}": getattr(config, field.name) for field in fields(config)}
    return {**options, **dict.fromkeys(("rows", "tokens", _tokens(batch), *TOLD, _rest(batch), "layout"))}


def inputs_of(batch: Mapping[str, Any], tokens: Tensor) -> dict[str, object]:
    """The batch's inputs, as `empty_facts` names them."""
    told = {name: batch.get(name) for name in TOLD}
    return {_tokens(batch): tokens, **told, _rest(batch): {name: batch[name] for name in _others(batch)}}


def todo(batch: Mapping[str, Any]) -> str:
    """What to do if they differ."""
    embeddings = batch.get("inputs_embeds")
    return TODO + _OWN_EMBEDDINGS * (isinstance(embeddings, Tensor) and embeddings.requires_grad)


def _tokens(batch: Mapping[str, Any]) -> str:
    """The name of the input that holds the tokens."""
    return "inputs_embeds" if batch.get("input_ids") is None else "input_ids"


def _rest(batch: Mapping[str, Any]) -> str:
    others = _others(batch)
    return f"other inputs ({', '.join(others)})" if others else "other inputs"


def _others(batch: Mapping[str, Any]) -> list[str]:
    """The other inputs that ranks must hold alike: all but hints, which are not passed on."""
    known = {"input_ids", _tokens(batch), *TOLD, *KERNEL_HINTS}
    return sorted(name for name, x in batch.items() if name not in known and x is not None)
