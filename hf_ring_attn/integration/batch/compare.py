"""What the ranks of a ring compare of their batches before they cut them: numbers, by names that say what differs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ...comm.fingerprint import fingerprint
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


def empty_facts(config: RingConfig, batch: Mapping[str, Any]) -> dict[str, int]:
    """All that is compared, as many on every rank: the options, and 0 for what is found out later."""
    options = {f"RingConfig.{field.name}": _option(getattr(config, field.name)) for field in fields(config)}
    return {**options, **dict.fromkeys(("rows", "tokens", _tokens(batch), *TOLD, _rest(batch), "layout"), 0)}


def fingerprints(batch: Mapping[str, Any], tokens: Tensor) -> dict[str, int]:
    """Of the batch's inputs. Reads them on the host."""
    told = {name: _number(batch.get(name)) for name in TOLD}
    return {_tokens(batch): fingerprint(tokens), **told, _rest(batch): _number({n: batch[n] for n in _others(batch)})}


def todo(batch: Mapping[str, Any]) -> str:
    """What to do if they differ."""
    embeddings = batch.get("inputs_embeds")
    return TODO + _OWN_EMBEDDINGS * (isinstance(embeddings, Tensor) and embeddings.requires_grad)


def _tokens(batch: Mapping[str, Any]) -> str:
    """The name of the input that holds the tokens."""
    return "inputs_embeds" if batch.get("input_ids") is None else "input_ids"


def _option(value: object) -> int:
    """A whole number is told as it is, words by their fingerprint."""
    return int(value) if isinstance(value, int) else -1 if value is None else zlib.crc32(repr(value).encode())


def _rest(batch: Mapping[str, Any]) -> str:
    others = _others(batch)
    return f"other inputs ({', '.join(others)})" if others else "other inputs"


def _others(batch: Mapping[str, Any]) -> list[str]:
    """The other inputs that ranks must hold alike: all but hints, which are not passed on."""
    known = {"input_ids", _tokens(batch), *TOLD, *KERNEL_HINTS}
    return sorted(name for name, x in batch.items() if name not in known and x is not None)


def _number(x: Any) -> int:
    """A fingerprint of tensors and numbers, nested ones too; of anything else 0."""
    if x is None or isinstance(x, Tensor):
        return fingerprint(x)
    if isinstance(x, int | float):
        return fingerprint(torch.tensor(x))
    parts = x.items() if isinstance(x, Mapping) else enumerate(x) if isinstance(x, (tuple, list)) else ()
    numbers = [(zlib.crc32(str(name).encode()), _number(part)) for name, part in parts]
    return fingerprint(torch.tensor(numbers, dtype=torch.int64)) if numbers else 0
