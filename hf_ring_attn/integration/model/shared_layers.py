"""Marks layers that share keys and values, as in Gemma 3n and Gemma 4, with their roles for `shared_kv`."""

from __future__ import annotations

from torch import nn

from ...traffic.gathered_kv import LAST, MAKES, TAKES, small
from ..context.batch_context import BatchContext
from ..context.shared_kv import ROLE

_MAKES, _TAKES = "store_full_length_kv", "is_kv_shared_layer"
"""transformers' attributes of attention modules that have these roles."""


def prepare(model: nn.Module, _context: BatchContext) -> None:
    """Marks the layers of ``model`` that share keys and values. A wrong mark costs traffic, never the answer."""
    layers = [module for module in model.modules() if {_MAKES, _TAKES} <= vars(module).keys()]
    takers = [module for module in layers if getattr(module, _TAKES)]
    for module in layers if takers else []:
        if module in takers:
            vars(module)[ROLE] = small(LAST if module is takers[-1] else TAKES)
        elif getattr(module, _MAKES):
            vars(module)[ROLE] = small(MAKES)
