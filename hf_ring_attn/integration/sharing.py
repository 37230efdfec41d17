"""Keys and values that layers share, as in Gemma 3n and Gemma 4: gathered once in a forward, and kept until its last
layer that attends to them.

transformers marks such layers, whatever the model. The marks say what is worth keeping, and how long. Whether a layer
attends to what was kept is told by its tensors alone: the very same objects, unchanged since, under the same plan. So a
mark that means something else costs traffic or memory, and never the answer.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..tables import Plan
from ..traffic import Kept

MAKES, TAKES = "store_full_length_kv", "is_kv_shared_layer"
"""Attributes of attention modules: others attend to its keys and values; it attends to another one's."""

_LAST: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""By a layer whose keys and values others attend to: the last layer of its model that attends to another one's."""


def install(model: nn.Module) -> None:
    """Notes which layers of ``model`` share keys and values."""
    layers = [module for module in model.modules() if {MAKES, TAKES} <= vars(module).keys()]
    takers = [module for module in layers if getattr(module, TAKES)]
    for module in layers:
        if takers and getattr(module, MAKES):
            _LAST[module] = weakref.ref(takers[-1])


@dataclass(frozen=True, eq=False)
class _Made:
    """What a layer attended to, and all that another one must have in common with it.

    ``dtype``: in which it was gathered, which autocast may change. ``last``: the layer after which it goes.
    """

    value: Tensor
    versions: tuple[int, int]
    plan: Plan
    dtype: torch.dtype
    last: weakref.ref[nn.Module]
    kept: Kept


class Shared:
    """The gathered keys and values of one batch that are kept.

    They go with the last layer that attends to them or, if that never runs, with their keys or the batch's context;
    where checkpointing holds the keys, with the first layer that is computed again.
    """

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()

    def clear(self) -> None:
        """Keeps nothing any more."""
        self._made.clear()

    def kept(self, module: nn.Module, key: Tensor, value: Tensor, plan: Plan, dtype: torch.dtype) -> Kept | None:
        """For a layer that is about to attend: where its keys and values are, or are to be left. None: neither.

        Each rank of a ring gets the same: by structure and identity, nothing that could differ between them.
        """
        if torch._C._current_graph_task_id() != -1:  # a checkpoint's recompute: nothing is kept through a backward
            self._made.clear()
            return None
        if key.is_inference():  # it has no count of its changes
            return None
        versions = key._version, value._version
        made: _Made | None = self._made.get(key)
        if made is None and module in _LAST:
            made = self._made[key] = _Made(value, versions, plan, dtype, _LAST[module], Kept())
        if any(each.last() is module for each in self._made.values()):
            self._made.clear()
        if made is None or made.value is not value:
            return None
        return made.kept if (made.versions, made.plan, made.dtype) == (versions, plan, dtype) else None
