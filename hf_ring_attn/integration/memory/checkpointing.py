"""Gradient checkpointing in a ring: finds each layer's checkpoint function, and adds three options to it.

``save_attention``: the output and log-sum-exp of each attention are saved, B x T x H x (Dv + 1 or 2) numbers a layer,
so that a recompute neither gathers nor attends; all else is recomputed. Only non-reentrant checkpointing can do so.
"auto" decides for each batch (`auto_saving`).
``keep_layers``: the last layers run without their checkpoint, so that the backward computes nothing of them again.
``offload_above``: inputs of layers, and their saved attention, wait in host memory (`offloading`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from ...attention.saved_results import Saved, save_here
from ..context import batch_context
from ..context.batch_context import BatchContext
from ..context.model_record import CHECKPOINT_FUNCTIONS, OF_TORCH, Visits, latest_record
from ..log import warn
from ..patching.modules import replace
from . import auto_saving
from .auto_saving import Budget, Saving
from .offloading import CheckpointedLayer, CheckpointedLayers, LayerCall, input_bytes, number


def unsupported(model: nn.Module, context: BatchContext) -> Iterator[str]:
    """Yields the reason why inputs of layers could not be offloaded."""
    if context.config.offload_above is not None and latest_record(model).compiled:
        yield "offload_above moves checkpoints from Python, which torch.compile would trace: leave one of them out"


def prepare(model: nn.Module, context: BatchContext) -> None:
    """Gives every checkpointed layer in ``model`` the policy, unless it has another one, and numbers them."""
    record, config = latest_record(model), context.config
    visit = context.state(Visits).get(record)
    modules = record.modules() if visit is None else visit.checkpointing
    sites = _sites(modules)
    stock = "OffloadWrapper" in record.classes
    wanted = config.offload_above is not None or stock or any(_is_offloading(function) for *_, function in sites)
    if config.save_attention is True and _save_attention(model, sites, warn):
        context.log.features.add("attention saved")
    text_alone = context.text is None or context.whole_head  # images take memory by other numbers than tokens
    possible = config.save_attention == "auto" and text_alone and not record.compiled
    asked = context.ring.size > 1 or config.keep_layers == "auto"  # one process saves what it is told to
    possible = possible and asked and model.training and torch.is_grad_enabled()
    saving, layers = context.state(Saving), record.state(CheckpointedLayers)
    saving.possible = possible and _save_attention(model, sites, lambda _text: None)
    layers.clear()
    if config.keep_layers and model.training and torch.is_grad_enabled():
        _keep_layers(modules, context, bool(wanted), record.compiled)
    if wanted and sites:
        layers += _numbered(modules, stock)
        saving.budget = Budget((config.offload_above or 0.0) * 2**30, input_bytes(layers), len(layers))
        context.log.features.add(f"checkpoints above {config.offload_above or 0:g} GiB on the host")
    elif wanted and model.training:
        warn("offload_above has no effect: nothing checkpoints a layer. Set gradient_checkpointing=True.")


Site = tuple[nn.Module, str, Any]
"""A module, the attribute of its checkpoint function, and that function."""


def _sites(modules: list[nn.Module]) -> list[Site]:
    return [
        (module, name, function)
        for module in modules
        for name in CHECKPOINT_FUNCTIONS
        if isinstance(function := module.__dict__.get(name), functools.partial)
    ]


def is_reentrant(model: nn.Module) -> bool:
    """Returns True if a checkpoint of ``model`` is reentrant: its inputs must then require a gradient."""
    functions = (_split(function)[1] for *_, function in _sites(latest_record(model).modules()))
    return any(function.keywords.get("use_reentrant") is not False for function in functions)


# ---- saved attention ----


def _save_attention(model: nn.Module, sites: list[Site], say: Callable[[str], None]) -> bool:
    """Gives checkpoints the policy that saves attention, unless they have another one. Returns True if all have it."""
    if not sites and model.training:
        say(
            "save_attention=True has no effect: nothing checkpoints a layer of the model. Set "
            "gradient_checkpointing=True, or leave it out."
        )
    for module, name, function in sites:
        around, inner = _split(function)
        policy = inner.keywords.get("context_fn")
        if policy is not None:
            if policy is not contexts:
                say("save_attention=True has no effect beside another context_fn: leave one of them out.")
                return False
            continue
        if inner.keywords.get("use_reentrant") is not False:
            say(
                "save_attention=True has no effect under reentrant checkpointing, whose recompute gathers again: set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
            return False
        selective = functools.partial(inner.func, *inner.args, **inner.keywords, context_fn=contexts)
        replace(module, name, selective if around is None else functools.partial(_checkpointed, around, selective))
    return bool(sites)


def contexts(save: Callable[[Tensor, Tensor], Saved] = save_here) -> Any:
    """Makes the contexts that `torch.utils.checkpoint.checkpoint` takes as context_fn."""
    context = batch_context.current()
    if TracingContext.try_get() is not None:  # a compiler needs a policy, and pays for it once
        return create_selective_checkpoint_contexts(
            _policy if context and auto_saving.saves_attention(context) else _recompute
        )
    return (context and auto_saving.contexts(context, save)) or (nullcontext(), nullcontext())


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_attention = op is torch.ops.hf_ring_attn.ring_flash_attn_fwd.default
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute(_context: Any, _op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


# ---- kept layers ----


def _keep_layers(modules: list[nn.Module], context: BatchContext, offloads: bool, compiled: bool) -> None:
    """Lets layers run without their checkpoint: those that RingConfig says, or as many as `auto_saving` decides."""
    saving, chosen = context.state(Saving), context.config.keep_layers
    saving.layers = 0 if offloads or compiled else len(_numbered(modules, False))
    if isinstance(chosen, int):
        auto_saving.keep(context, min(chosen, saving.layers))
    if not saving.layers:
        nothing = "nothing checkpoints a layer. Set gradient_checkpointing=True"
        why = "checkpoints wait in host memory" if offloads else "layers are compiled" if compiled else nothing
        warn(f"keep_layers has no effect: {why}.")


# ---- offloading ----


def _numbered(modules: list[nn.Module], stock: bool) -> list[CheckpointedLayer]:
    """Puts `_checkpointed` around the checkpoint function of each layer; returns those that run."""
    numbered: list[CheckpointedLayer] = []
    for module, name, function in _sites(modules):
        layer, _ = _split(function)
        if layer is None:
            layer = CheckpointedLayer(stock or _is_offloading(function))
            replace(module, name, functools.partial(_checkpointed, layer, function))
        layer.order = ()
        runs = isinstance(module, GradientCheckpointingLayer) and module.__dict__.get("gradient_checkpointing", True)
        if runs or name == OF_TORCH:
            numbered.append(layer)
    number(numbered)
    return numbered


def _split(function: Any) -> tuple[CheckpointedLayer | None, Any]:
    """Splits a patched checkpoint function into its layer, if `_checkpointed` has one, and the function itself."""
    return function.args if function.func is _checkpointed else (None, function)


def _is_offloading(function: Any) -> bool:
    """Returns True for the function of transformers' ``offload``, which copies on the computation's stream."""
    layer, inner = _split(function)
    return (layer is not None and layer.stock) or _copies_to_host(inner)


def _copies_to_host(function: Any) -> bool:
    return "save_on_cpu" in getattr(getattr(function.func, "__code__", None), "co_names", ())


def _checkpointed(layer: CheckpointedLayer, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a checkpoint function; in a sharded batch, what it saves may wait in host memory, or its layer is kept."""
    context = batch_context.current()
    if context is not None and layer.is_among_last(context.state(Saving).kept):
        run, *inputs = args
        return run(*inputs, **kwargs)
    limit = None if context is None else context.config.offload_above
    if context is not None and limit is None and layer.stock:
        limit = 0.0
    if context is None or limit is None or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if _copies_to_host(function):
        function = functools.partial(checkpoint, *function.args, **function.keywords)
    saves = function.keywords.get("context_fn") is contexts and auto_saving.saves_attention(context)
    call = LayerCall(layer, limit, saves, context)
    if saves:
        function = functools.partial(function, context_fn=functools.partial(contexts, call.save))
    with saved_tensors_hooks(call.pack, call.unpack):
        found = function(*args, **kwargs)
    call.end()
    return found
