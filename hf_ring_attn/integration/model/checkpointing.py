"""Gradient checkpointing that saves attention, so that a layer's recompute neither gathers nor attends.

The output and log-sum-exp of each attention are saved, B x T x H x (Dv + 1 or 2) numbers a layer; all else is
recomputed. Only non-reentrant checkpointing can be selective.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ...attention.saved_results import SavedResults
from ..context.batch_context import BatchContext
from ..context.introspect import modules_of
from ..log import warn


def prepare(model: nn.Module, context: BatchContext) -> None:
    """Gives every checkpointed layer of transformers in ``model`` the policy, unless it has another one."""
    if not context.config.save_attention:
        return
    functions = [
        (module, function)
        for module in modules_of(model)
        if isinstance(function := module.__dict__.get("_gradient_checkpointing_func"), functools.partial)
    ]
    if not functions and model.training:
        warn(
            "save_attention=True has no effect: transformers checkpoints no layer of the model. Set "
            "gradient_checkpointing=True (and FSDP's own activation checkpointing to False), or leave it out."
        )
    for module, function in functions:
        policy = function.keywords.get("context_fn")
        if policy is not None:
            if policy is not contexts:
                warn("save_attention=True has no effect beside another context_fn: leave one of them out.")
            continue
        if function.keywords.get("use_reentrant") is not False:
            warn(
                "save_attention=True has no effect under reentrant checkpointing, whose recompute gathers again: set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
            return
        selective = functools.partial(function.func, *function.args, **function.keywords, context_fn=contexts)
        module.__dict__["_gradient_checkpointing_func"] = selective


def contexts() -> Any:
    """Makes the contexts that `torch.utils.checkpoint.checkpoint` takes as context_fn."""
    if TracingContext.try_get() is not None:  # a compiler needs a policy, and pays for it once
        return create_selective_checkpoint_contexts(_policy)
    return SavedResults().contexts()


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_attention = op is torch.ops.hf_ring_attn.ring_flash_attn_fwd.default
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE
