"""Keys and values that layers share, as in Gemma 3n and Gemma 4: gathered once in a forward, and kept until its last
layer that attends to them.

transformers marks such layers, whatever the model. The marks say what is worth keeping, and how long. Whether a layer
attends to what was kept is told by its tensors alone: the very same objects, unchanged since, under the same plan; in
compiled code, where tensors are no objects, the same bits (`ComparedKV`). So a mark that means something else costs
traffic or memory, and never the answer.

Objects cost nothing and bits a small message, which all ranks must send. A compiler may give a layer up on one rank and
not on another. So where anything was compiled on some rank before a batch, or a layer with a role was traced since, all
layers of all ranks, compiled or not, go by their bits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...sharding.plan import Plan
from ...traffic import ComparedKV, GatheredKV, LayerRole
from ...traffic.gathered_kv import LAST, MAKES, recomputing

ROLE = "_hf_ring_attn_role"
"""Our attribute of attention modules: a tensor [1], for a compiler makes a new graph for each number."""


@dataclass(frozen=True, eq=False)
class _Made:
    """What a layer attended to, and all that another one must have in common with it.

    ``dtype``: in which it was gathered, which autocast may change.
    """

    value: Tensor
    versions: tuple[int, int]
    plan: Plan
    dtype: torch.dtype
    kept: GatheredKV


class SharedKV:
    """The gathered keys and values of one batch that are kept.

    They go with the last layer that attends to them or, if that never runs, with the batch's context, with the first
    layer that a checkpoint computes again, or with their keys, unless they are known by their bits.
    """

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()
        self._compared = ComparedKV()

    def clear(self) -> None:
        """Keeps nothing any more."""
        self._made.clear()
        self._compared.clear()

    def kept(
        self, module: nn.Module, key: Tensor, value: Tensor, plan: Plan, dtype: torch.dtype
    ) -> GatheredKV | LayerRole | None:
        """For a layer that is about to attend: where its keys and values are, or are to be left. None: neither.

        Each rank of a ring gets the same: by structure and identity, nothing that could differ between them.
        """
        if _traced:
            return self._role(module)
        if recomputing():  # nothing is kept through a backward
            self._made.clear()
            return None
        if key.is_inference():  # it has no count of its changes
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
        return made.kept if (made.versions, made.plan, made.dtype) == (versions, plan, dtype) else None

    def traced(self, module: nn.Module) -> LayerRole | None:
        """The same for a layer that a compiler is tracing."""
        role = self._role(module)
        if role is not None:
            go_by_bits()
        return role

    def _role(self, module: nn.Module) -> LayerRole | None:
        role: Tensor | None = module.__dict__.get(ROLE)
        return None if role is None else LayerRole(self._compared.number, role)


_traced = False
"""Whether layers go by their bits. On each rank alike: it is agreed at each batch, and at first all of them trace."""


def compiled_here() -> bool:
    """Whether this process has compiled anything, and so perhaps given up a layer that others compile."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return _traced or (dynamo is not None and bool(dynamo.counters["frames"]["total"]))


# A compiler runs it where it traces a call, and leaves nothing of it in its graph.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def go_by_bits() -> bool:
    """From here on, on every rank."""
    global _traced
    _traced = True
    return True
