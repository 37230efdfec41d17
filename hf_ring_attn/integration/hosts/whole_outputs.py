"""A model's outputs for whole rows, of those for each rank's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ... import errors
from ..batch.shard import Sharded
from ..losses.lazy_logits import with_logits

OF_TOWERS = {"image_outputs", "video_outputs", "audio_outputs"}
"""Outputs of models with images and sound since transformers 5.24."""


def whole_sequences(sharded: Sharded, name: str, x: Any, pooled: bool = False) -> Any:
    """Gathers a model's output to whole sequences. ``pooled``: it is known to have no entries for tokens."""
    if sharded.context.whole_head or pooled:  # it is whole
        return with_logits(x, "predict")
    if isinstance(x, (tuple, list)):
        return type(x)(whole_sequences(sharded, name, part) for part in x)
    layout = sharded.layout
    if name in OF_TOWERS and isinstance(x, Mapping):  # whole rows run there, on every rank
        return x
    if name == "aux_loss" and isinstance(x, Tensor) and x.dim() == 0:  # that of whole rows, on every rank
        return x
    if name == "router_logits" and isinstance(x, Tensor) and x.dim() == 2 and len(x) % layout.local_length == 0:
        return sharded.gather(x.unflatten(0, (-1, layout.local_length))).flatten(0, 1)
    if isinstance(x, Tensor) and x.dim() >= 2:
        if x.shape[1] == layout.local_length:
            return sharded.gather(x)
        if x.shape[1] == layout.length:  # gathered already, for the gathered loss
            return x
    raise errors.UnknownOutput(name, tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__, layout.local_length)
