"""RoPE whose frequencies depend on the longest position of the batch ("dynamic" NTK, "longrope").

transformers takes that position from a rank's position_ids, so each rank would choose other frequencies. A pair of
hooks appends the largest position of the whole batch, and drops the row that this adds to cos and sin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..context import batch_context
from ..context.batch_context import BatchContext
from ..patching.hooks import attach


def prepare(model: nn.Module, _context: BatchContext) -> None:
    """Hooks the rotary modules whose frequencies depend on the batch."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        if any(k is not None and ("dynamic" in k or k == "longrope") for k in kinds):
            attach(module, "longest position", _show_longest, _drop_longest)


def _longest() -> int | None:
    context = batch_context.current()
    return None if context is None or context.ring.size == 1 else context.facts.max_position


def _show_longest(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    longest = _longest()
    if longest is None:
        return None
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": _with(kwargs["position_ids"], longest)}
    x, position_ids, *rest = args
    return (x, _with(position_ids, longest), *rest), kwargs


def _with(position_ids: Tensor, longest: int) -> Tensor:
    return torch.cat([position_ids, position_ids.new_full((*position_ids.shape[:-1], 1), longest)], -1)


def _drop_longest(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if output is None or _longest() is None:
        return None
    if isinstance(output, Tensor):  # complex exponentials (DeepSeek V2, Llama 4)
        return output[..., :-1, :]
    return tuple(x[..., :-1, :] for x in output)
