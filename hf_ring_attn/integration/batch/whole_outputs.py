"""Outputs of a model for whole rows, of those that ranks have for their tokens: gathered, in order, differentiably."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import errors
from ..context.introspect import CACHES
from ..gradients import loss_gradients
from ..losses.lazy_logits import with_logits
from .shard import Sharded


def whole_output(output: Any, sharded: Sharded, pooled: Collection[str] = (), name: str = "") -> Any:
    """A model's output with an entry for each token of the rows, in their order. It is differentiable.

    Left out is what has no entry for each of a rank's tokens, a cache for example.

    Args:
        pooled: the names of outputs that are known to have none, and that are the same on every rank. name: of this
            one.
    """
    if sharded.context.whole_head or name in pooled:
        return with_logits(output, "output of whole rows")
    if isinstance(output, Mapping):
        if name in OF_TOWERS:  # whole rows run there, on every rank
            return output
        fields = {key: whole_output(x, sharded, pooled, key) for key, x in output.items() if key not in CACHES}
        return type(output)(**{key: x for key, x in fields.items() if x is not None})
    if isinstance(output, (tuple, list)):
        parts: Any = [whole_output(x, sharded, pooled, name or f"{at}") for at, x in enumerate(output)]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if not isinstance(output, Tensor):
        return None
    if output.dim() == 0:
        return output if name in LOSSES else None
    local = sharded.layout.local_length
    if name == "router_logits" and output.dim() == 2 and len(output) % local == 0:
        return _gathered(output.unflatten(0, (-1, local)), sharded).flatten(0, 1)
    is_of_tokens = output.dim() >= 2 and output.shape[1] == local
    return _gathered(output, sharded) if is_of_tokens else None


def _gathered(x: Tensor, sharded: Sharded) -> Tensor:
    whole = sharded.gather(x)
    if whole.requires_grad and sharded.ring.size > 1:
        whole.register_hook(lambda gradient: loss_gradients.compare_norm(gradient, sharded.ring))
    return whole


OF_TOWERS = {"image_outputs", "video_outputs", "audio_outputs"}
"""Outputs of models with images and sound since transformers 5.24."""
LOSSES = {"loss", "aux_loss", "0"}
"""Outputs that are one number for whole rows, on every rank; "0" is the first one of a tuple."""


def whole_of_fused(output: Any, sharded: Sharded) -> Any:
    """The output of TRL's fused head for whole rows: entries of a label, since no token follows the last one."""
    if not isinstance(output, Mapping) or output.get("log_probs") is None:
        raise errors.UnknownOutput("log_probs", None, sharded.layout.local_length)
    fields = {name: x for name, x in output.items() if name != "loss"}  # that of this rank's tokens
    for name, x in fields.items():
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[1] == sharded.layout.local_length:
            whole = sharded.gather(x.byte()).bool() if x.dtype == torch.bool else sharded.gather(x)
            fields[name] = whole[:, :-1]
    return type(output)(**fields)


def kept_logits(output: Any, kept: int | Tensor) -> Any:
    """The output with logits of some tokens alone, as transformers' heads choose them."""
    places = slice(-kept or None, None) if isinstance(kept, int) else kept
    if isinstance(output, Mapping):
        fields = {name: x[:, places] if name == "logits" else x for name, x in output.items()}
        return type(output)(**fields)
    return tuple(x[:, places] if at == (output[0].dim() == 0) else x for at, x in enumerate(output))


def of_tokens(output: Any) -> Tensor:
    """An output's logits, or the first one of its tensors of tokens."""
    if isinstance(output, Mapping):
        output = [x for name, x in output.items() if name not in LOSSES]
    parts = output if isinstance(output, (tuple, list)) else [output]
    return next(x for x in parts if isinstance(x, Tensor) and x.dim() > 1)


def weighed(x: Tensor) -> Tensor:
    """The sum of x [B, S, ...], in which each token has its own weight, for the self-check."""
    weights = 1 + torch.linspace(0, 9, x.shape[1], device=x.device).sin() / 2
    return (x * weights[:, None]).sum()
