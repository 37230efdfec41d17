"""Adapters of layers that FSDP2's own activation checkpointing wrapped are saved whole.

PEFT picks an adapter's weights by the names of its modules. The wrapper's name is part of these, but not of the names
of weights. So PEFT 0.21 saves an adapter without weights, and does not say so.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..context.batch_context import BatchContext
from ..context.model_record import latest_record
from ..patching.changes import Original, Patch, around, install

_WRAPPER, _PART = "CheckpointWrapper", "_checkpoint_wrapped_module."
"""torch's class, and what it adds to names; `fully_shard` makes a subclass of it."""


def prepare(model: nn.Module, context: BatchContext) -> None:
    """Changes what PEFT saves if a ring trains adapters in such layers, until `uninstall`.

    Raises:
        ChangedHost: PEFT's function has other parameters than the change needs.
    """
    record = latest_record(model)
    is_wrapped = context.ring.size > 1 and _WRAPPER in record.classes
    if is_wrapped and any(getattr(module, "peft_config", None) for module in record.modules()):
        install(PATCHES)


@around
def _weights_of_adapter(
    original: Original, model: Any, state_dict: dict[str, Tensor] | None = None, *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    names = _wrapped_layers(model)
    if names:
        found = model.state_dict() if state_dict is None else state_dict
        state_dict = {_by_module(name, names): x for name, x in found.items()}
    return {name.replace(_PART, ""): x for name, x in original(model, state_dict, *args, **kwargs).items()}


def _wrapped_layers(model: nn.Module) -> dict[str, str]:
    """The beginning of weights' names of each wrapped layer, and that of its modules' names; inner layers first."""
    names = [f"{name}.{_PART}" for name, module in model.named_modules() if _PART[:-1] in module._modules]
    return {name.replace(_PART, ""): name for name in reversed(names)}


def _by_module(name: str, names: dict[str, str]) -> str:
    for plain, wrapped in names.items():
        if name.startswith(plain):
            return wrapped + name.removeprefix(plain)
    return name


_PARAMETERS = "(model, state_dict=, adapter_name=, unwrap_compiled=, save_embedding_layers=)"
PATCHES = [
    Patch(f"{module}:get_peft_model_state_dict", _PARAMETERS, _weights_of_adapter)
    for module in ("peft", "peft.peft_model")
]
"""The one that transformers, accelerate and programs import, and the one of `PeftModel.save_pretrained`."""
