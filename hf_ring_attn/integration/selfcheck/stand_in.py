"""The model that a program's loss gets in a trial step: under DDP a wrapper with its names, which sends nothing.

A program may know weights by DDP's names ("module.model..."), or take the model out of its wrapper. DDP itself would
send buffers, and record a forward for a backward that never comes.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..context.program_states import TORCHS_OWN


class _StandIn(DistributedDataParallel):
    """Calls the model inside. It has no hooks, and of DDP the attributes alone."""

    def __init__(self, original: DistributedDataParallel) -> None:
        nn.Module.__init__(self)
        self.__dict__.update({name: x for name, x in vars(original).items() if name not in TORCHS_OWN})
        self.module = original.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


_StandIn.__name__ = DistributedDataParallel.__name__


def stand_in(model: nn.Module, inner: nn.Module) -> nn.Module:
    """Returns what stands for the outermost ``model``: ``inner``, which is tried, or a wrapper around it."""
    if isinstance(model, DistributedDataParallel) and model.module is inner:
        return _StandIn(model)
    return inner
