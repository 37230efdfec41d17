"""Admits a model to a ring: each kind of model says what it does not support, and prepares what it does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Protocol

from torch import nn

from ... import errors
from ...config import RingConfig
from ..context.batch_context import BatchContext
from ..context.introspect import configs_of, name_of, unwrapped
from ..context.model_record import ModelRecord, configured, record_of
from ..log import warn
from . import (
    adapters,
    checkpointing,
    experts,
    fsdp,
    loss,
    multimodal,
    recurrent,
    rope,
    shared_layers,
    structure,
    temperature,
    training_mode,
)

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


class ModelSupport(Protocol):
    """One kind of model, layer or wrapper. Both functions are called before the first batch of a kind."""

    def unsupported(self, model: nn.Module, context: BatchContext) -> Iterator[str]:
        """Every reason, in words, why ``model`` would not be exact in this batch; none means that it is."""
        ...

    def prepare(self, model: nn.Module, context: BatchContext) -> None:
        """Hooks modules or patches functions, idempotent and inert outside a sharded batch."""
        ...


SUPPORT: tuple[ModelSupport, ...] = (
    fsdp, structure, recurrent, temperature, experts, adapters, rope, shared_layers, loss,
)  # fmt: skip
"""Asked once for each structure of a model and kind of batch."""

EACH_BATCH: tuple[ModelSupport, ...] = (training_mode, checkpointing, multimodal)
"""Asked for every batch: a mode or a rate changes without a change of structure."""


class _Admitted(set[tuple[object, ...]]):
    """The kinds of batches with which a model was found exact."""


def bind(model: nn.Module, context: BatchContext) -> ModelRecord:
    """Refuses what is not exact of an outermost model that runs in a ring, and prepares the rest.

    Raises:
        UnsupportedModel: with every reason. LossNotSharded: see `loss`.
    """
    record, log, facts = record_of(model), context.log, context.facts
    options = configured(record.configs)
    if options is not None and not facts.explicit:
        _adopt(options, context)
    wrappers = unwrapped(model)
    log.seen.update(record.ids, map(id, wrappers))
    log.called = True
    log.models.add(model)
    model = wrappers[-1]
    log.configs += record.configs
    case = (
        context.ring.size, model.training, facts.has_labels, facts.numbered, facts.hidden is not None,
        context.ring.size == 1 and facts.documents is not None, context.config.loss, context.keeps_labels,
        context.text is not None, "trl" in sys.modules,
    )  # fmt: skip
    admitted = record.state(_Admitted)
    asked = EACH_BATCH if case in admitted else (*SUPPORT, *EACH_BATCH)
    reasons = [reason for support in asked for reason in support.unsupported(model, context)]
    if case not in admitted:
        known = _known_layers(model)
        reasons += [reason for config in record.configs for reason in _config_reasons(config, context, known)]
    if reasons:
        raise errors.UnsupportedModel(name_of(model), list(dict.fromkeys(reasons)))
    for support in asked:
        support.prepare(model, context)
    if not recurrent.recurrent_of(model).attends:
        log.attends = False
        log.kernel = log.kernel or "none, since nothing attends"
    if case not in admitted and context.ring.size > 1 and model.training:
        training_mode.say_dropout(model)
    if case not in admitted and any(getattr(config, "output_attentions", False) for config in record.configs):
        warn("output_attentions=True gives no attention weights with ring_fp32: they never exist.")
    admitted.add(case)
    return record


def _adopt(options: RingConfig, context: BatchContext) -> None:
    """Takes the options of a model whose batch was sharded before anyone knew which model it is for.

    Raises:
        UnevenLength: the batch was padded, and they forbid it. LateLayout: they want another layout.
    """
    layout = context.layout
    if not options.pad and layout.padded != layout.length:
        raise errors.UnevenLength(layout.length, layout.world_size)
    if options.layout == "balanced" != context.config.layout and context.facts.documents is not None:
        raise errors.LateLayout()
    context.config = options


def refuse(config: Any, context: BatchContext) -> None:
    """Refuses a model that was not bound by its transformers config alone."""
    if config is None or id(config) in context.log.seen:
        return
    context.log.seen.add(id(config))
    reasons = list(_config_reasons(config, context, ATTENTION_LAYERS))
    if reasons:
        raise errors.UnsupportedModel(type(config).__name__, reasons)


def refuse_always(model: nn.Module) -> None:
    """Refuses a model that is to be trained, whatever its batches hold: before the first is looked at.

    Its trainer will set it for training, but it may still be in the mode of evaluation (from_pretrained).
    """
    reasons = [reason for config in configs_of(model) for reason in _decoder_reasons(config)]
    reasons += training_mode.noise_reasons(model)
    if reasons:
        raise errors.UnsupportedModel(name_of(model), list(dict.fromkeys(reasons)))


def _known_layers(model: nn.Module) -> set[str]:
    found = recurrent.recurrent_of(model)
    return ATTENTION_LAYERS | (recurrent.LAYERS if found.layers and found.unknown is None else set())


def _decoder_reasons(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported"


def _config_reasons(config: Any, context: BatchContext, known: set[str]) -> Iterator[str]:
    if context.ring.size == 1:
        return
    yield from _decoder_reasons(config)
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    foreign = sorted({str(layer) for layer in layers} - known)
    if foreign:
        yield f"its layers of type {foreign} do not go through ring attention exactly"
