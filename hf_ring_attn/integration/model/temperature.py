"""Llama 4's temperature tuning: layers without RoPE scale queries by their place in the row.

transformers counts that place from the start of the rank's tensor (Llama4TextAttention.forward). In a ring hooks turn
this off, and `ring_attention_forward` scales by the same formula with the places in the whole row. A layer's mask shows
that it runs in a ring, in a recompute too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..context.batch_context import BatchContext, MaskSpec
from ..context.introspect import place_of
from ..patching.modules import attach, attached

_KEY = "temperature"
_TURNED_OFF = "_hf_ring_attn_turned_off"
"""The attribute of a layer that is True while a hook has turned its tuning off."""
_NEEDS = ("use_rope", "floor_scale", "attn_scale")


def _tuned(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if module.__dict__.get("attn_temperature_tuning") or attached(module, _KEY):
            yield name, module


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields the layers whose temperature tuning is unknown."""
    for name, module in _tuned(model) if context.ring.size > 1 else ():
        if not all(hasattr(module, attribute) for attribute in _NEEDS):
            yield f"{place_of(name, module)} has a temperature tuning that is not Llama 4's"


def prepare(model: nn.Module, _context: BatchContext) -> None:
    """Hooks the layers that scale their queries by place."""
    for _, module in _tuned(model):
        if not getattr(module, "use_rope", True):
            attach(module, _KEY, _turn_off, _turn_on)


def _turn_off(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _turn_on(module)  # if Ctrl-C ended the call before
    specs = [x for x in (*args, *kwargs.values()) if isinstance(x, MaskSpec)]
    if module.attn_temperature_tuning and any(spec.layout.world_size > 1 for spec in specs):
        module.attn_temperature_tuning = False
        setattr(module, _TURNED_OFF, True)


def _turn_on(module: Any, *_call: Any) -> None:
    if getattr(module, _TURNED_OFF, False):
        module.attn_temperature_tuning = True
        setattr(module, _TURNED_OFF, False)


def scale_queries(module: Any, query: Tensor, spec: MaskSpec) -> Tensor:
    """Scales queries [B, H, T, D] of a layer that is tuned, as in one process; returns others unchanged."""
    if not getattr(module, _TURNED_OFF, False):
        return query
    places = spec.places_on(query.device)
    steps = torch.floor((places.float() + 1.0) / module.floor_scale)
    factors = torch.log1p(steps) * module.attn_scale + 1.0
    tuned: Tensor = (query * factors[:, None]).to(query.dtype)
    return tuned
