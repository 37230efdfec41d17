"""Frees the embeddings of a row whose layers' inputs wait in host memory.

Hosts make the output of frozen embeddings require a gradient (`enable_input_require_grads`), which only reentrant
checkpointing needs. Such a leaf of the graph stays until the end of the backward: the first layer's input, on the GPU,
though its checkpoint is on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..context.model_record import latest_record
from ..patching.compiler import uncompiled
from .checkpointing import is_reentrant
from .offloading import CheckpointedLayers

HOSTS_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""The names of the hooks in transformers and in PEFT."""
_BY_HOST = "hf_ring_attn frees the embeddings of a row whose checkpoints are on the host"


def free_embeddings(model: nn.Module, running: bool, hooks: ExitStack) -> None:
    """Hooks the embeddings of ``model`` whose gradient nobody can read, until ``hooks`` closes.

    Args:
        running: the model is running already.
    """
    record, calls = latest_record(model), _Calls(running)
    if not record.state(CheckpointedLayers) or is_reentrant(model):
        return
    embeddings = list(_unread(record.modules()))
    if embeddings:
        hooks.enter_context(model.register_forward_pre_hook(calls.before))
        hooks.enter_context(model.register_forward_hook(calls.after, always_call=True))
    for module in embeddings:
        hooks.enter_context(module.register_forward_hook(calls.embedded))


def _unread(modules: list[nn.Module]) -> Iterator[nn.Module]:
    """Modules with such a hook, no other one that sees their output or its gradient, and without trained weights.

    FSDP2 has a hook there, too. It gathers the weights again for a backward, which frozen embeddings do not have.
    """
    for module in modules:
        owned = ((hook, getattr(hook, "__self__", None)) for hook in module._forward_hooks.values())
        hooks = [hook for hook, owner in owned if type(owner).__name__ != "FSDPState"]
        by_hosts = [getattr(hook, "__name__", "") in HOSTS_HOOKS for hook in hooks]
        watched = module._backward_hooks or module._backward_pre_hooks or not all(by_hosts)
        if hooks and not watched and not any(weight.requires_grad for weight in module.parameters()):
            yield module


class _Calls:
    """The calls of a model. A program that calls the embeddings by itself gets what the host's hook makes of them."""

    def __init__(self, running: bool) -> None:
        self.running = running

    @uncompiled(_BY_HOST)
    def before(self, _model: nn.Module, _inputs: Any) -> None:
        self.running = True

    @uncompiled(_BY_HOST)
    def after(self, _model: nn.Module, _inputs: Any, _output: Any) -> None:
        self.running = False

    @uncompiled(_BY_HOST)
    def embedded(self, _module: nn.Module, _inputs: Any, output: Any) -> Tensor | None:
        is_leaf = isinstance(output, Tensor) and output.is_leaf and output.requires_grad
        return output.detach() if self.running and is_leaf and torch.is_grad_enabled() else None
