"""RoPE whose frequencies depend on the longest position of the batch ("dynamic" NTK, "longrope").

transformers takes that position from a rank's position_ids, so each rank would choose other frequencies. A pair of
hooks appends the largest position of the whole batch, and drops the row that this adds to cos and sin.

A checkpoint's recompute may run after the batch's context, or in another batch's. So the position is remembered with
the position_ids that the module got in its forward: a recompute gets the same ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import errors
from ...traffic.gathered_kv import is_recomputing
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.tracked_input import memory_of
from ..patching.compiler import uncompiled
from ..patching.modules import Arguments, attach
from .whole_layers import WITHIN

_LONGEST = WeakIdKeyDictionary()
"""The longest position of the batch of each tensor of position_ids that a module got; None outside of a ring."""
_SHOWS = "_hf_ring_attn_shows_longest"
"""The attribute of a module that ran in a ring; True while its position_ids have one more."""


def prepare(model: nn.Module, _context: BatchContext) -> None:
    """Hooks the rotary modules whose frequencies depend on the batch."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        if any(k is not None and ("dynamic" in k or k == "longrope") for k in kinds):
            attach(module, "longest position", _show_longest, _drop_longest)


def _longest(module: nn.Module, position_ids: Tensor) -> int | None:
    """The longest position of the batch of these position_ids; None outside of a ring, and in a layer on whole rows."""
    if WITHIN.depth:
        return None
    context = batch_context.current()
    found = None if context is None or context.ring.size == 1 else context.facts.max_position
    if found is not None and torch.compiler.is_dynamo_compiling():  # a recompute of a graph is in the graph
        return found
    return _remembered(module, position_ids, found) if found is not None or hasattr(module, _SHOWS) else None


# Not compiled: a compiler's tensors have no identity.
@uncompiled("hf_ring_attn remembers position_ids for a recompute")
def _remembered(module: nn.Module, position_ids: Tensor, of_batch: int | None) -> int | None:
    """Remembers the longest position in a forward, and returns that of the forward in a recompute."""
    if not is_recomputing():
        _LONGEST[position_ids] = of_batch
        return of_batch
    if position_ids in _LONGEST:
        known: int | None = _LONGEST[position_ids]
        return known
    for tensor, longest in _LONGEST.items():  # a reentrant checkpoint detaches its inputs
        if memory_of(tensor) == memory_of(position_ids):
            found: int | None = longest
            return found
    if of_batch is None:
        raise errors.RopeOutsideRing(type(module).__name__)
    return of_batch


def _show_longest(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    by_name = "position_ids" in kwargs
    longest = _longest(module, kwargs["position_ids"] if by_name else args[1])
    if longest is not None or hasattr(module, _SHOWS):
        setattr(module, _SHOWS, longest is not None)
    if longest is None:
        return None
    if by_name:
        return args, {**kwargs, "position_ids": _with(kwargs["position_ids"], longest)}
    x, position_ids, *rest = args
    return (x, _with(position_ids, longest), *rest), kwargs


def _with(position_ids: Tensor, longest: int) -> Tensor:
    return torch.cat([position_ids, position_ids.new_full((*position_ids.shape[:-1], 1), longest)], -1)


def _drop_longest(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if output is None or not getattr(module, _SHOWS, False):
        return None
    if isinstance(output, Tensor):  # complex exponentials (DeepSeek V2, Llama 4)
        return output[..., :-1, :]
    return tuple(x[..., :-1, :] for x in output)
