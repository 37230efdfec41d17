"""Which models a ring can train exactly, and the options set on a model."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForSequenceClassificationLoss

from ... import errors
from ..context import shared_kv
from ..context.batch_context import Scope
from ..context.introspect import class_of, configs_of, head_of, name_of, uses_ring
from ..log import warn
from . import (
    adapters,
    checkpointing,
    custom_forward,
    experts,
    multimodal,
    recurrent,
    rope,
    structure,
    temperature,
    training_mode,
)

_ADMITTED: weakref.WeakKeyDictionary[nn.Module, set[tuple[int | bool, ...]]] = weakref.WeakKeyDictionary()
"""Models that were looked at and found exact, by ring size, mode, and what the batch holds."""

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
NORM = re.compile(r"Norm(Gated)?$")
RECURRENT = re.compile(r"Mamba|Rwkv|Recurrent|GatedDelta|ShortConv|LinearAttention|LightningAttention|xLSTM")
UNTESTED_WRAPPERS = {
    "FullyShardedDataParallel": "FSDP1 is not tested: use FSDP2 (fsdp_version: 2) or DDP",
    "DeepSpeedEngine": "DeepSpeed is not tested: use FSDP2 or DDP",
}


def bind(model: nn.Module, scope: Scope) -> None:
    """Called with every outermost model that runs in a ring: refuses what is not exact, and prepares the rest."""
    scope.checked.update(id(module) for module in model.modules())
    scope.called = True
    scope.models.add(model)
    configs = list(configs_of(model))
    scope.configs += configs
    # A model's structure is judged once per mode, not once per batch, but for what single modules may change meanwhile;
    # its configs are read for every mask.
    case = (
        scope.ring.size, model.training, scope.has_labels, scope.numbered, scope.hidden is not None,
        scope.ring.size == 1 and scope.documents is not None, experts.asks(configs), scope.config.loss == "gathered",
        scope.whole_loss,
    )  # fmt: skip
    if scope.late:
        multimodal.install(model, scope)
    if scope.config.save_attention:
        checkpointing.keep_attention(model)
    recurrent.prepare(model)
    experts.prepare(model)
    if not attends(model):
        scope.attends = False
        scope.kernel = scope.kernel or "none, since nothing attends"
    admitted = case in _ADMITTED.get(model, ())
    reasons = [] if admitted else list(_reasons(model, scope))
    if scope.ring.size > 1:
        reasons += training_mode.reasons(model)
    if reasons:
        raise errors.UnsupportedModel(name_of(model), list(dict.fromkeys(reasons)))
    if admitted:
        return
    if scope.has_labels and scope.ring.size > 1:
        _refuse_loss(model, scope.whole_loss)
    rope.install(model)
    temperature.install(model)
    shared_kv.install(model)
    if any(getattr(config, "output_attentions", False) for config in configs_of(model)):
        warn("output_attentions=True gives no attention weights with ring_fp32: they never exist.")
    _ADMITTED.setdefault(model, set()).add(case)


def _refuse_loss(model: nn.Module, whole: bool) -> None:
    """Labels make the model compute a loss of its shard; only a causal language model's is exact then.

    ``whole``: its loss_function will be given whole rows, so it may be any.
    """
    head = head_of(model)
    if head is None:
        return
    # transformers falls back to the causal loss where it knows no loss of that name (GPT2LMHeadModel, say).
    causal = LOSS_MAPPING.get(str(head.loss_type), ForCausalLMLoss) is ForCausalLMLoss
    asked = any(custom_forward.asks_loss_function(forward) for _, forward in custom_forward.of_classes(head))
    if not causal or not asked:
        raise errors.LossNotSharded(f"the loss of {type(head).__name__}, which is no causal language model's,")
    function = head.loss_function  # transformers' own, unless somebody set another one, or the class has its own
    if not whole and function is not ForCausalLMLoss:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise errors.LossNotSharded(f"the loss of {class_of(head)}, whose loss_function is {name},", gathers=True)
    custom_forward.refuse_unknown(model, head)


def refuse(config: Any, scope: Scope) -> None:
    """Refuses a model by its transformers config alone."""
    if config is None or id(config) in scope.checked or scope.ring.size == 1:
        return
    scope.checked.add(id(config))
    reasons = list(_config_reasons(config, scope))
    if reasons:
        raise errors.UnsupportedModel(type(config).__name__, reasons)


def refuse_always(model: nn.Module) -> None:
    """Refuses a model that is to be trained, whatever its batches hold: before the first is looked at.

    Its trainer will set it for training, but it may still be in the mode of evaluation (from_pretrained).
    """
    reasons = [reason for config in configs_of(model) for reason in _decoder_reasons(config)]
    reasons += [reason for module in model.modules() for reason in noise_reasons(module)]
    if reasons:
        raise errors.UnsupportedModel(name_of(model), list(dict.fromkeys(reasons)))


def _reasons(model: nn.Module, scope: Scope) -> Iterator[str]:
    other_positions = structure.position_reasons(model, scope.hidden is not None) if scope.numbered else ()
    recurrent_layers = recurrent.recurrent_layers(model)
    stateful = _recurrent(model, recurrent_layers)
    if scope.ring.size == 1:  # whose rows `shard` has numbered too
        yield from other_positions
        if stateful is not None and scope.documents is not None:
            yield f"{_where(model, stateful)} carries state from one document of a packed row to the next"
        return
    configs = list(configs_of(model))
    if configs and not uses_ring(model):
        yield f"its attn_implementation is {configs[0]._attn_implementation!r}, not 'ring_fp32'"
    if configs and attends(model) and not _uses_interface(model):
        yield "its code does not use transformers' attention interface, so its attention would stay on each rank"
    if recurrent_layers and stateful is None:
        recurrent.admit(configs)
    for config in configs:
        yield from _config_reasons(config, scope)
    if LOSS_MAPPING.get(str(getattr(head_of(model), "loss_type", None))) is ForSequenceClassificationLoss:
        yield "it classifies a sequence by one token, which each rank would look for among its own"
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in UNTESTED_WRAPPERS:
            yield UNTESTED_WRAPPERS[kind]
        if name == stateful:
            yield f"{_where(model, name)} carries state along the sequence"
            break
        if model.training:
            yield from noise_reasons(module)
    yield from structure.reasons(model, recurrent_layers, attends(model))
    yield from other_positions
    yield from temperature.reasons(model)
    yield from experts.reasons(model, scope, configs)
    yield from adapters.reasons(model)


def noise_reasons(module: nn.Module) -> Iterator[str]:
    if getattr(module, "neftune_noise_alpha", None):
        yield "NEFTune scales its noise by the local length; set neftune_noise_alpha=None"


_ATTENDS: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def attends(model: nn.Module) -> bool:
    """Whether ``model`` is to attend; False where all of its layers are recurrences that are known to `hybrids`."""
    if model not in _ATTENDS:
        recurrent_layers = recurrent.recurrent_layers(model)
        alone = len(recurrent_layers) > 0 and _recurrent(model, recurrent_layers) is None and not _uses_interface(model)
        _ATTENDS[model] = not (alone and recurrent.without_attention(list(configs_of(model))))
    return _ATTENDS[model]


def _where(model: nn.Module, name: str) -> str:
    return f"{name or 'it'} ({type(model.get_submodule(name)).__name__})"


def _recurrent(model: nn.Module, recurrent_layers: Mapping[str, nn.Module]) -> str | None:
    """The first module that carries state along the sequence in a way that is not known to `hybrids`; None if none."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if (
            not RECURRENT.search(kind)
            or NORM.search(kind)
            or any(name.startswith(f"{mixer}.") for mixer in recurrent_layers)
        ):
            continue
        holds = any(inner is mixer for mixer in recurrent_layers.values() for inner in module.modules())
        if not holds and not (recurrent_layers and "ALL_ATTENTION_FUNCTIONS" in recurrent.names_of(module)):
            return str(name)
    return None


def _uses_interface(model: nn.Module) -> bool:
    """Whether the file of any transformers model in ``model`` refers to the attention interface."""
    files = {type(module).__module__ for module in model.modules() if "config" in module.__dict__}
    return any(hasattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS") for file in files)


def _decoder_reasons(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported"


def _config_reasons(config: Any, scope: Scope) -> Iterator[str]:
    yield from _decoder_reasons(config)
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    known = ATTENTION_LAYERS | (recurrent.LAYERS if recurrent.admitted(config) else set())
    foreign = sorted({str(layer) for layer in layers} - known)
    if foreign:
        yield f"its layers of type {foreign} do not go through ring attention exactly"
