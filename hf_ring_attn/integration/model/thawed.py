"""Refuses weights that began to train after DDP wrapped their model: DDP averages no gradients of these.

So each rank would step by the gradient of its own tokens. Without a ring replicas drift apart in the same way.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ... import errors
from ..context.batch_context import BatchContext
from ..context.introspect import name_of, unwrapped
from ..context.model_record import Visits, latest_record

_SEEN: weakref.WeakKeyDictionary[nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
"""The identities of the weights that trained in any batch of each DDP wrapper, which keeps them alive."""


def refuse_thawed(model: nn.Module, context: BatchContext) -> None:
    """Refuses a batch in which a model under DDP trains weights that were frozen when it was wrapped.

    DDP says how many weights it averages, not which: those that trained until now, and no others, if they are as many.

    Raises:
        UnsupportedModel: with the name of the first such weight.
    """
    wrapper: Any = next((one for one in unwrapped(model) if type(one).__name__ == "DistributedDataParallel"), None)
    if wrapper is None or context.ring.size == 1 or not model.training or not torch.is_grad_enabled():
        return
    visit = context.state(Visits).get(latest_record(model))
    if visit is None:
        return
    trained = frozenset(map(id, visit.trained))
    before = _SEEN.get(wrapper, frozenset())
    if trained <= before:
        return
    averaged = wrapper._get_ddp_logging_data()["num_parameter_tensors"]
    if len(before | trained) > averaged:
        late = trained - before
        name = next(name for name, x in model.named_parameters() if id(x) in late).removeprefix("module.")
        raise errors.UnsupportedModel(
            name_of(model),
            [
                f"its weights began to train after DDP wrapped it ({name}, ...): DDP averages the {averaged} weights "
                "that trained then, and no gradients of others, without a ring either; let them train before train(), "
                "with ddp_find_unused_parameters=True, or wrap anew"
            ],
        )
    _SEEN[wrapper] = before | trained
