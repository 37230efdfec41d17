"""Questions about a model: its configs, its inner model, its name, its forward's parameters."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


def configs_of(model: nn.Module) -> Iterator[Any]:
    """The distinct transformers configs of a model's modules, wrappers looked through."""
    seen: set[int] = set()
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "_attn_implementation") and id(config) not in seen:
            seen.add(id(config))
            yield config


def uses_ring(model: nn.Module) -> bool:
    """Whether ``model``, or its text part, has attn_implementation "ring_fp32"."""
    return any(config._attn_implementation == "ring_fp32" for config in configs_of(model))


def unwrapped(model: nn.Module) -> list[nn.Module]:
    """``model``, then the model inside it, as long as it is DDP or what torch.compile returns; the last is neither."""
    is_ddp = type(model).__name__ == "DistributedDataParallel"
    inner = model._modules.get("module" if is_ddp else "_orig_mod")
    return [model] if inner is None else [model, *unwrapped(inner)]


def inside(model: nn.Module) -> nn.Module:
    """The model inside DDP, which would note a forward without gradients, and inside what torch.compile returns."""
    return unwrapped(model)[-1]


def parameters_of(model: nn.Module, names: Iterable[str] = ()) -> list[str]:
    """The parameters of a model's forward, in their order; ``names`` too, where it takes what has any name."""
    parameters = inspect.signature(inside(model).forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return [*(parameter.name for parameter in parameters), *(names if takes_any else ())]


def name_of(model: nn.Module) -> str:
    """Of the model inside DDP and other wrappers, which is the one that the user made."""
    return class_of(next((module for module in model.modules() if "config" in module.__dict__), model))


def class_of(module: nn.Module) -> str:
    """The name of a module's class as its author wrote it: fully_shard makes a subclass."""
    return next(cls for cls in type(module).__mro__ if not cls.__name__.startswith("FSDP")).__name__


def head_of(model: nn.Module) -> Any:
    """The model of transformers inside wrappers, which has the loss; None if there is none."""
    # By __dict__: a PEFT model passes every attribute on, as if it were its own.
    return next((module for module in model.modules() if "loss_type" in module.__dict__), None)


def is_unit(module: nn.Module) -> bool:
    """What `fully_shard` was called with: by name, since torch.distributed is not imported here."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def uses_interface(model: nn.Module) -> bool:
    """Returns True if the file of any transformers model in ``model`` refers to the attention interface."""
    files = {type(module).__module__ for module in model.modules() if "config" in module.__dict__}
    return any(hasattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS") for file in files)
