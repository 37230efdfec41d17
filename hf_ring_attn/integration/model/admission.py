"""Admits a model to a ring: lists what is unsupported of each kind of model, and prepares the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ... import errors
from ...comm.ring import Ring
from ...config import RingConfig
from ...sharding.layout import Layout
from ..context import shared_kv
from ..context.batch_context import BatchContext
from ..context.introspect import configs_of, inside, name_of, text_modules
from ..context.model_record import ModelRecord, Visits, configured, latest_record, visit
from ..gradients import hooks as gradient_hooks
from ..gradients import weight_parts
from ..log import warn
from ..losses import shared_losses, whole_heads
from ..memory import checkpointing, mlp_chunks
from . import (
    adapters,
    experts,
    indexers,
    liger,
    multimodal,
    quantized,
    recurrent,
    rope,
    shared_pictures,
    structure,
    temperature,
    training_mode,
    vocabulary,
    whole_attention,
    wrapped_adapters,
)
from .decoder import named_kinds


@dataclass(frozen=True)
class Support:
    """The support of several kinds of models, layers and wrappers.

    Args:
        reasons: each yields, in words, why a model would not be exact in a batch.
        prepare: each hooks modules or patches functions, idempotent and inert outside a sharded batch; or it raises a
            refusal of its own.
    """

    reasons: tuple[Callable[[nn.Module, BatchContext], Iterator[str]], ...]
    prepare: tuple[Callable[[nn.Module, BatchContext], None], ...]


ONCE = Support(
    (
        weight_parts.unsupported, structure.unsupported, recurrent.unsupported, temperature.unsupported,
        experts.unsupported, adapters.unsupported, quantized.unsupported, shared_losses.unsupported,
        mlp_chunks.unsupported, checkpointing.unsupported, gradient_hooks.unsupported,
    ),
    (
        recurrent.prepare, temperature.prepare, experts.prepare, rope.prepare, shared_kv.mark_layers, liger.prepare,
        quantized.prepare, wrapped_adapters.prepare, indexers.prepare, whole_attention.prepare,
    ),
)  # fmt: skip
"""Called once for each structure of a model and kind of batch."""

EACH_BATCH = Support(
    (training_mode.unsupported, multimodal.unsupported),
    (
        shared_losses.refuse_unshared,
        whole_heads.prepare,
        checkpointing.prepare,
        multimodal.prepare,
        shared_pictures.prepare,
        mlp_chunks.prepare,
        vocabulary.prepare,
    ),
)
"""Called for every batch: a mode, a rate or a loss changes without a change of structure."""


class _Admitted(set[tuple[object, ...]]):
    """The kinds of batches that a model was admitted for."""


def bind(model: nn.Module, context: BatchContext) -> ModelRecord:
    """Binds an outermost model to a batch: refuses it with every reason, or prepares it.

    Raises:
        UnsupportedModel. LossNotSharded: see `losses.shared_losses`.
    """
    record, visits = latest_record(model), context.state(Visits)
    if record not in visits:
        record, visits[record] = visit(model)
    options = configured(record.configs)
    if options is not None and not context.facts.explicit:
        _apply_model_options(options, context)
    outermost, model = model, inside(model)
    context.log.configs += record.configs
    case, admitted, suspected = _kind_of(model, context), record.state(_Admitted), record.state(structure.Suspicions)
    is_new = case not in admitted
    asked = [ONCE, EACH_BATCH] if is_new else [EACH_BATCH]
    reasons = [reason for support in asked for find in support.reasons for reason in find(model, context)]
    if is_new:
        reasons += _reasons_of_configs(model, record, context)
        reasons += [] if reasons else weight_parts.not_averaged(outermost, context)
        suspected[:] = structure.suspicions(model, context)  # the self-check decides on these
    if reasons:
        _refuse_for(model, [*suspected.of_text().reasons(), *reasons])
    for prepare in (prepare for support in asked for prepare in support.prepare):
        prepare(model, context)
    if not recurrent.recurrent_of(model).attends:
        context.log.attends = False
        context.log.kernel = context.log.kernel or "none, since nothing attends"
    if is_new:
        if context.ring.size > 1 and model.training:
            training_mode.say_dropout(model)
        if any(getattr(config, "output_attentions", False) for config in record.configs):
            warn("output_attentions=True gives no attention weights with ring_fp32: they never exist.")
    admitted.add(case)
    return record


def _kind_of(model: nn.Module, context: BatchContext) -> tuple[object, ...]:
    """The kind of a batch, and the mode of its model: all that the functions of `ONCE` ask of both."""
    facts, config, size = context.facts, context.config, context.ring.size
    return (
        size, model.training, torch.is_grad_enabled(), facts.has_labels, facts.numbered, facts.hidden is not None,
        size == 1 and facts.documents is not None, config.loss, context.gathers_logits, context.text is not None,
        context.whole_head, "trl" in sys.modules, config.mlp_tokens is None, config.offload_above is None,
    )  # fmt: skip


def _refuse_for(model: nn.Module, reasons: list[str]) -> None:
    """Raises UnsupportedModel with each reason once, if there are any."""
    if reasons:
        raise errors.UnsupportedModel(name_of(model), list(dict.fromkeys(reasons)))


def _apply_model_options(options: RingConfig, context: BatchContext) -> None:
    """Takes the options of a model whose batch was sharded without it.

    Raises:
        UnevenLength: the batch was padded, and they forbid it. LateLayout: they ask for another layout.
    """
    layout = context.layout
    if not options.pad and layout.padded != layout.length:
        raise errors.UnevenLength(layout.length, layout.world_size)
    if options.layout == "balanced" != context.config.layout and context.facts.documents is not None:
        raise errors.LateLayout()
    context.config = options


def refuse(config: Any, context: BatchContext) -> None:
    """Refuses a model that was not bound, by its transformers config and the wrappers around it.

    Inside FSDP1, without use_orig_params, modules have no parameters, and so are taken for no models.
    """
    if config is None or context.ring.size == 1 or any(config is known for known in context.log.configs):
        return
    reasons = [*_decoder_reasons(config), *_layer_reasons(config, whole_attention.KINDS), *weight_parts.untested()]
    if reasons:
        raise errors.UnsupportedModel(type(config).__name__, reasons)


def refuse_always(model: nn.Module) -> None:
    """Refuses a model that a trainer is about to train, with any batch."""
    _refuse_for(model, [reason for config in latest_record(model).configs for reason in _decoder_reasons(config)])


def refuse_in_ring(model: nn.Module) -> None:
    """Refuses a model that a ring cannot train, whatever its ranks and its batch; its weights may be on "meta".

    Raises:
        UnsupportedModel.
    """
    context = BatchContext(Ring.simulated(2, 0), Layout(4, 2, 0), RingConfig())
    suspected = structure.Suspicions(structure.suspicions(model, context)).of_text()
    reasons = suspected.reasons() + [reason for find in ONCE.reasons for reason in find(model, context)]
    _refuse_for(model, reasons + _reasons_of_configs(model, latest_record(model), context))


def _reasons_of_configs(model: nn.Module, record: ModelRecord, context: BatchContext) -> list[str]:
    """The reasons in a model's configs: an encoder-decoder, and layers of types that are not known."""
    if context.ring.size == 1:
        return []
    found = recurrent.recurrent_of(model)
    known = whole_attention.KINDS | whole_attention.kinds_of(model)
    known |= whole_attention.HYBRIDS if (found.layers or found.whole) and not found.unknown else set()
    known |= indexers.LAYERS if indexers.indexers_of(model) else set()
    decoders = [reason for config in record.configs for reason in _decoder_reasons(config)]
    of_text = configs_of(module for _, module in text_modules(model))  # a tower's layers see whole images
    return decoders + [reason for config in of_text for reason in _layer_reasons(config, known)]


def _decoder_reasons(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported"


def _layer_reasons(config: Any, known: set[str]) -> Iterator[str]:
    foreign = sorted({str(layer) for layer in named_kinds(config)} - known)
    if foreign:
        yield f"its layers of type {foreign} do not go through ring attention exactly"
