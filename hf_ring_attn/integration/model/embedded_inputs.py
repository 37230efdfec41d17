"""Frees the embeddings of a row whose layers' inputs wait in host memory.

Hosts make the output of frozen embeddings require a gradient (`enable_input_require_grads`), which only reentrant
checkpointing needs. Such a leaf of the graph stays until the end of the backward: the first layer's input, on the GPU,
though its checkpoint is on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..context.model_record import latest_record
from ..patching.changes import Undo
from ..patching.compiler import uncompiled
from .checkpointing import is_reentrant
from .offloading import CheckpointedLayers

HOSTS_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""The names of the hooks in transformers and in PEFT."""


def free(model: nn.Module) -> list[Undo]:
    """Hooks the embeddings of ``model`` whose gradient nobody can read. Returns functions that remove the hooks."""
    record = latest_record(model)
    if not record.state(CheckpointedLayers) or is_reentrant(model):
        return []
    return [module.register_forward_hook(_detached).remove for module in _frozen(record.modules())]


def _frozen(modules: list[nn.Module]) -> Iterator[nn.Module]:
    """Modules with such a hook, without trained weights and without hooks on their backward."""
    for module in modules:
        hooked = any(getattr(hook, "__name__", "") in HOSTS_HOOKS for hook in module._forward_hooks.values())
        watched = module._backward_hooks or module._backward_pre_hooks
        if hooked and not watched and not any(weight.requires_grad for weight in module.parameters()):
            yield module


@uncompiled("hf_ring_attn frees the embeddings of a row whose checkpoints are on the host")
def _detached(_module: nn.Module, _inputs: Any, output: Any) -> Tensor | None:
    is_leaf = isinstance(output, Tensor) and output.is_leaf and output.requires_grad
    return output.detach() if is_leaf and torch.is_grad_enabled() else None
