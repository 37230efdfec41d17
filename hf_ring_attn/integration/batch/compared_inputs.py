"""The inputs and options of a batch that the ranks of a ring compare, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from ...config import RingConfig
from ..context.whole_batch import KERNEL_HINTS

TODO = (
    "Every rank of a ring must get the same whole batch. Leave out DistributedSampler and split_dataset_by_node (in "
    "Lightning set use_distributed_sampler=False), seed shuffling, and set dispatch_batches=False. If a dataset or a "
    "collator draws random numbers, no rank may draw alone: generate samples on all ranks."
)
_OWN_EMBEDDINGS = (
    " These inputs_embeds require a gradient. If a module outside the model made them, nobody averages its gradients, "
    "and it differs between ranks after a step. Call sharded.reduce_gradients(module) with it, too, after backward and "
    "before each step."
)
NAMED = (
    "labels", "shift_labels", "position_ids", "attention_mask", "block_sequence_ids", "token_type_ids",
    "mm_token_type_ids", "num_items_in_batch", "pixel_values", "pixel_values_videos", "image_grid_thw",
    "video_grid_thw", "input_features", "second_per_grid_ts", "image_sizes", "pixel_attention_mask",
)  # fmt: skip
"""Inputs that ranks compare one by one, so that an error can name the one that differs."""
REST = "other inputs"


def empty_facts(config: RingConfig, batch: Mapping[str, Any]) -> dict[str, object]:
    """All compared facts, the same number on every rank: the options, and None for facts that are not known yet."""
    return {"RingConfig": config, **dict.fromkeys(("rows", "tokens", _tokens(batch), *NAMED, REST, "layout"))}


def inputs_of(batch: Mapping[str, Any]) -> dict[str, object]:
    """The batch's inputs, as `empty_facts` names them."""
    named = {name: _compared(batch.get(name)) for name in NAMED}
    known = {"input_ids", _tokens(batch), *NAMED, *KERNEL_HINTS}  # hints are not passed on
    others = sorted(name for name, x in batch.items() if name not in known and x is not None)
    return {_tokens(batch): batch.get(_tokens(batch)), **named, REST: {name: _compared(batch[name]) for name in others}}


def advice_for(batch: Mapping[str, Any]) -> str:
    """The advice if they differ."""
    embeddings = batch.get("inputs_embeds")
    return TODO + _OWN_EMBEDDINGS * (isinstance(embeddings, Tensor) and embeddings.requires_grad)


def _tokens(batch: Mapping[str, Any]) -> str:
    """The name of the input that holds the tokens."""
    return "inputs_embeds" if batch.get("input_ids") is None else "input_ids"


def _compared(x: Any) -> Any:
    """An input as ranks compare it: without strings (names of files, prompts), with which no model computes.

    Numbers and arrays of numpy become Python's and tensors, whose values are read.
    """
    if isinstance(x, Mapping):
        return {name: _compared(part) for name, part in x.items()}
    if isinstance(x, (tuple, list)):
        return [_compared(part) for part in x]
    if isinstance(x, numpy.generic) or (isinstance(x, numpy.ndarray) and x.dtype.kind not in "biuf"):
        return _compared(x.tolist())
    if isinstance(x, numpy.ndarray):
        return torch.from_numpy(numpy.ascontiguousarray(x))
    return None if isinstance(x, (str, bytes)) else x
