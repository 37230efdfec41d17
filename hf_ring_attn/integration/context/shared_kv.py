"""Gathered K/V shared by layers, as in Gemma 3n and Gemma 4: gathered once per forward, stored until the last use.

transformers marks such layers in every model. A layer reuses stored K/V only if its tensors match: the same objects,
unchanged, under the same plan; in compiled code, where tensors have no identity, the same bits (`ComparedKV`). So a
wrong mark costs traffic or memory, never the answer.

Comparing bits takes a small collective of all ranks, and a compiler may fall back to eager on one rank only. So if any
rank compiled anything before a batch, or traced a layer with a role since, all layers of all ranks compare bits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...sharding.plan import Plan
from ...traffic import ComparedKV, GatheredKV, LayerRole
from ...traffic.gathered_kv import LAST, MAKES, TAKES, is_recomputing, number_tensor
from ..patching.modules import replace

ROLE = "_hf_ring_attn_role"
"""Our attribute of attention modules: a tensor [1], since a compiler makes a new graph for each number."""


_MAKES, _TAKES = "store_full_length_kv", "is_kv_shared_layer"
"""transformers' attributes of attention modules that have these roles."""


def makes_kv(module: nn.Module) -> bool:
    """Returns True if other layers attend to the keys and values of this attention module."""
    return bool(vars(module).get(_MAKES)) and _TAKES in vars(module)


def takes_kv(module: nn.Module) -> bool:
    """Returns True if an attention module has no keys and values, but attends to those of another layer."""
    return bool(vars(module).get(_TAKES)) and _MAKES in vars(module)


def mark_layers(model: nn.Module, _context: object) -> None:
    """Marks the layers of ``model`` that share keys and values with their roles."""
    takers = [module for module in model.modules() if takes_kv(module)]
    for module in model.modules() if takers else []:
        if takes_kv(module):
            replace(module, ROLE, number_tensor(LAST if module is takers[-1] else TAKES))
        elif makes_kv(module):
            replace(module, ROLE, number_tensor(MAKES))


@dataclass(frozen=True, eq=False)
class _Made:
    """A layer's K/V, and the facts that another layer must match to reuse them. ``dtype``: the gathered dtype."""

    value: Tensor
    versions: tuple[int, int]
    plan: Plan
    dtype: torch.dtype
    store: GatheredKV


class SharedKV:
    """The gathered K/V of one batch that layers share.

    The last layer that uses them frees them; else the batch's context, or the first recompute of a checkpoint.
    """

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()
        self._compared = ComparedKV()

    def clear(self) -> None:
        """Frees everything stored."""
        self._made.clear()
        self._compared.clear()

    def store_of(
        self, module: nn.Module, key: Tensor, value: Tensor, plan: Plan, dtype: torch.dtype
    ) -> GatheredKV | LayerRole | None:
        """Returns the store of a layer's keys and values, filled or to fill, the same on each rank; None: none."""
        if _traced:
            return self._role(module)
        if is_recomputing():  # nothing is stored through a backward
            self._made.clear()
            return None
        if key.is_inference():  # it has no version counter
            return None
        role = int(vars(module).get(ROLE, 0))
        versions = key._version, value._version
        made: _Made | None = self._made.get(key)
        if made is None and role == MAKES:
            made = self._made[key] = _Made(value, versions, plan, dtype, GatheredKV())
        if role == LAST:
            self._made.clear()
        if made is None or made.value is not value:
            return None
        return made.store if (made.versions, made.plan, made.dtype) == (versions, plan, dtype) else None

    def traced_role(self, module: nn.Module) -> LayerRole | None:
        """Takes the place of `store_of` for a layer that a compiler is tracing."""
        role = self._role(module)
        if role is not None:
            go_by_bits()
        return role

    def _role(self, module: nn.Module) -> LayerRole | None:
        role: Tensor | None = module.__dict__.get(ROLE)
        return None if role is None else LayerRole(self._compared.number, role)


_traced = False
"""True if layers compare bits. Ranks agree on it at each batch; at first all of them trace."""


def compiled_here() -> bool:
    """Returns True if this process has compiled anything, so that it may have fallen back to eager for a layer."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return _traced or (dynamo is not None and bool(dynamo.counters["frames"]["total"]))


# A compiler runs it while tracing a call, and leaves nothing of it in the graph.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def go_by_bits() -> bool:
    """Makes all layers compare bits from here on, on every rank."""
    global _traced
    _traced = True
    return True
