"""Lines beside a forecast: what it does not count, and positions beyond those of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ..integration.context.introspect import text_modules
from ..integration.model.decoder import decoder_layers
from .hardware import FLOAT32, GIB
from .linear_attention import FLA, NAME, scan_seconds, torch_bytes
from .memory import memory_of
from .positions import beyond
from .setup import Setup
from .shape import DeltaShape, ModelShape
from .tower import towers


def notes_on(config: Any, model: nn.Module, shape: ModelShape, setup: Setup) -> list[str]:
    """Returns a line for each fact of the model or the setup that its forecast does not show."""
    of_model = [*_other_class(config, model), *_towers(model, shape, setup), *beyond(config, model, setup.tokens)]
    of_model += _quantized(config, setup)
    of_setup = [*_chunks(setup), *_kept(shape, setup), *_logits(setup), *_storage(setup), *_accumulation(shape, setup)]
    of_setup += _wrapped(shape, setup)
    return [*of_model, *of_setup, *_linear_attention(shape, setup), *_unmeasured(shape, setup)]


def _other_class(config: Any, model: nn.Module) -> Iterator[str]:
    named, planned = getattr(config, "architectures", None) or [], type(model).__name__
    if named and planned not in named:
        yield f"the config names {', '.join(named)}; this forecast is of {planned}"


def _quantized(config: Any, setup: Setup) -> Iterator[str]:
    given = getattr(config, "quantization_config", None)
    if given is None:
        return
    method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
    counted = "in 4 bits of bitsandbytes" if setup.method == "qlora" else f"in {setup.dtype}"
    yield f"the config's weights are quantized ({method}); this forecast counts them {counted}"
    if setup.method == "full":
        yield "transformers trains no quantized weights: load them dequantized, or plan --method lora or qlora"


def _chunks(setup: Setup) -> Iterator[str]:
    if setup.mlp_tokens > setup.chunk:
        yield f"--mlp-tokens {setup.mlp_tokens} changes nothing: a GPU has {setup.tokens_per_rank:,} tokens of a row"


def _kept(shape: ModelShape, setup: Setup) -> Iterator[str]:
    if setup.keep_layers:
        yield f"{setup.keeps(len(shape.layers))} of {len(shape.layers)} layers keep their activations"


def _logits(setup: Setup) -> Iterator[str]:
    saves = setup.save_attention or setup.mlp_tokens or setup.offload_above is not None
    if setup.dtype == "float16":
        yield "with float16 a rank makes all logits of its tokens, for the GradScaler's factor; with bfloat16 none"
    elif not setup.takes_options:
        yield "a ring of 1 is none: without a ring Trainer on several GPUs makes all logits; SFTTrainer makes none"
    elif setup.gpus == 1 and setup.loss == "chunked" and not saves:
        yield 'on one GPU Trainer makes all logits unless RingConfig(loss="chunked") is set; SFTTrainer makes none'


def _storage(setup: Setup) -> Iterator[str]:
    if setup.method == "qlora" and setup.is_sharded:
        storage = f'bnb_4bit_quant_storage="{setup.dtype}"'
        yield f"FSDP2 shards 4-bit weights only with {storage}; with bitsandbytes's default each GPU holds all of them"


def _wrapped(shape: ModelShape, setup: Setup) -> Iterator[str]:
    if setup.gpus > 1 or setup.method != "full" or setup.itemsize == FLOAT32:
        return
    wrapped = memory_of(shape, replace(setup, shard="fsdp2", wrapped=True)).total / GIB
    yield (
        f"this is a launch without FSDP2; under a launch config with FSDP2, as the recipes have, one GPU holds trained "
        f"weights and gradients in float32, and needs {wrapped:.1f} GiB"
    )


def _accumulation(shape: ModelShape, setup: Setup) -> Iterator[str]:
    once, several = (memory_of(shape, setup, accumulates).allocated for accumulates in (False, True))
    if (more := (several - once) / GIB) >= 1:
        yield f"gradient accumulation takes {more:.1f} GiB more: the gradients of a step's first batch stay"


def _linear_attention(shape: ModelShape, setup: Setup) -> Iterator[str]:
    linear = [layer.attention for layer in shape.kinds if isinstance(layer.attention, DeltaShape)]
    if linear:
        more = max(torch_bytes(one, setup) for one in linear) / GIB
        yield f"linear attention is forecast with {FLA}; with transformers' own function it takes {more:.1f} GiB more"
    if not all(scan_seconds(one, setup) for one in linear):
        yield f"the time of {NAME} is not measured, and left out: a step takes longer than this forecast"


def _unmeasured(shape: ModelShape, setup: Setup) -> Iterator[str]:
    kinds = {
        "heads of several widths": len({(one.key_width, one.value_width) for one in shape.attentions}) > 1,
        f"{NAME} whose decays differ by channel": any(
            isinstance(layer.attention, DeltaShape) and layer.attention.by_channel for layer in shape.kinds
        ),
        "shared keys and values": shape.shares_kv, "inputs of each layer's own": any(x.own_input for x in shape.kinds),
        "an A100": not setup.gpu.has_flash4, "--offload-params": setup.offload_params,
    }  # fmt: skip
    if found := [kind for kind, is_there in kinds.items() if is_there]:
        yield f"no step with {' or '.join(found)} was measured, so no forecast of one was tested"


def _towers(model: nn.Module, shape: ModelShape, setup: Setup) -> Iterator[str]:
    """Parts that see no tokens, and lists of blocks beside the decoder layers, as of Idefics's cross-attention."""
    found = decoder_layers(model)
    layers = set() if found is None else {id(module) for module in found[1].modules()}
    for name, module in text_modules(model):
        blocks = isinstance(module, nn.ModuleList) and any(len(list(block.children())) for block in module)
        if blocks and id(module) not in layers:
            yield f"the weights of {name} are counted, its activations are not"
    for name, _ in towers(model):
        if shape.tower is None or shape.tower.name != name:
            yield f"the weights of {name} are counted, its activations and its time are not"
        elif not setup.pictures:
            yield f"the weights of {name} are counted; its activations and its time are, with --pictures N"
