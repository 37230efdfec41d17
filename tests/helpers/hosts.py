"""What differs between the oldest and the newest transformers that this package is tested with."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor
from transformers import Llama4ForConditionalGeneration, PreTrainedModel

CHECKPOINTS_SOME_LAYERS = hasattr(PreTrainedModel, "activation_checkpointing_enable")
"""Since 5.23: ``every_n_layers`` and ``offload``, and the name itself."""
LLAMA_4_FAILS = "cache" in signature(Llama4ForConditionalGeneration.forward).parameters
"""Since 5.24, without a ring, too: it reads an output of its text model that this does not have."""
_float = Tensor.float


def checkpoint(model: Any, use_reentrant: bool = False, **more: Any) -> None:
    """Turns a model's own checkpoints on, by the name that this version has."""
    how = {"use_reentrant": use_reentrant}
    if CHECKPOINTS_SOME_LAYERS:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how, **more)
    else:
        assert not more
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def stays_float64(x: Tensor) -> Tensor:
    """In place of ``Tensor.float``: indices become float32, as ever, and numbers keep their dtype."""
    return x if x.is_floating_point() else _float(x)
