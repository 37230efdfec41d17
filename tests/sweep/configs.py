"""A tiny model of any architecture: the defaults of its config, shrunk by the names of their entries.

Nothing is downloaded. What the rules here cannot guess stands in `overrides`, as data.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from .overrides import OVERRIDES, VARIANTS

VOCABULARY = 97

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "type_vocab_size": 2,
    # widths
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "emb_dim": 32, "embedding_size": 32, "embed_dim": 32,
    "word_embed_proj_dim": 32, "out_hidden_size": 32, "backbone_hidden_size": 32, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY, "projection_dim": 32, "lru_width": 32, "width": 32,
    "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "hidden_dim": 48, "encoder_ffn_dim": 48, "dim_ff": 48,
    "decoder_ffn_dim": 48, "ffn_hidden_size": 48, "intermediate_size_mlp": 48, "dense_intermediate_size": 48,
    "d_inner": 48, "dff": 48, "feed_forward_size": 48, "expert_ffn_hidden_size": 16, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "router_hidden_size": 16,
    # depths
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "depth": 2, "num_hidden_groups": 1,
    # heads
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "swa_num_attention_heads": 4, "head_dim": 8, "d_head": 8, "d_kv": 8, "dim_head": 8, "attention_head_size": 8,
    "swa_head_dim": 8, "global_head_dim": 16, "kv_channels": 8, "rotary_dim": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 12, "qk_head_dim": 16,
    # experts
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "num_expert_group": 1,
    "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "zero_expert_num": 2,
    # state along the sequence
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 4, "mamba_d_state": 8, "state_size": 8, "ssm_state_size": 8,
    "time_step_rank": 4, "mamba_dt_rank": 4, "conv_kernel": 4, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "attention_hidden_size": 32, "mamba_n_heads": 8, "mamba_d_head": 8, "n_mamba_heads": 4, "mamba_ngroups": 1,
    "n_groups": 1, "mamba_d_ssm": 64, "chunk_size": 8, "mamba_chunk_size": 8,
    # sparse indexers
    "index_head_dim": 8, "index_n_heads": 32, "index_topk": 6, "index_topk_blocks": 2, "index_block_size": 4,
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 6,
    # weights large enough that attention looks at some tokens and not at others
    "initializer_range": 0.2, "init_std": 0.2,
}  # fmt: skip
"""Entry: its value, wherever a config has this entry and its default is a number (for a few, None)."""

THRESHOLDS: dict[str, int] = {
    "sliding_window": 7, "sliding_window_size": 7, "attention_chunk_size": 8, "floor_scale": 4, "local_attention": 8,
    "original_max_position_embeddings": 8, "log_scaling_n_floor": 6, "attention_window": 8, "window_size": 7,
    "keep_window_size": 6, "index_topk": 6, "attention_window_size": 7, "log_scaling_floor": 6,
}  # fmt: skip
"""Entries beyond which a model attends otherwise, all below 12 tokens; `off` makes them larger than any row."""
OFF = 1 << 12

KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "multi_query_group_num")


@dataclass(frozen=True)
class Entry:
    """One row of transformers' auto mappings: ``task`` is "causal" or "masked"; ``variant`` one of `VARIANTS`."""

    model_type: str
    model_class: str
    task: str
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.model_class} ({self.model_type}{', ' if self.variant else ''}{self.variant})"


def entries() -> list[Entry]:
    """Every class of the two mappings, once for every config class that it is built from, with their variants."""
    found: dict[tuple[str, str], Entry] = {}
    mappings: dict[str, dict[str, Any]] = {
        "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    for task, mapping in mappings.items():
        for model_type, names in mapping.items():
            for model_class in [names] if isinstance(names, str) else names:
                if f"{model_type}_text" in mapping and model_class in mapping[f"{model_type}_text"]:
                    continue  # the text part's config builds the same model
                config_class = CONFIG_MAPPING[model_type].__name__
                found.setdefault((config_class, model_class), Entry(model_type, model_class, task))
    each = [[entry, *_variants(entry)] for entry in found.values()]
    return [entry for several in each for entry in several]


def _variants(entry: Entry) -> list[Entry]:
    return [replace(entry, variant=name) for name in VARIANTS.get(entry.model_type, {})]


def tiny_config(entry: Entry, **changes: Any) -> PreTrainedConfig:
    """The config of a class, tiny; ``changes`` go to every part of it that has such an entry."""
    config_class = CONFIG_MAPPING[entry.model_type]
    own = _own(entry)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config: PreTrainedConfig = config_class(**shrunk(config_class, own, changes, entry.task == "causal"))
    model_class: Any = getattr(transformers, entry.model_class)
    if not isinstance(config, model_class.config_class):  # as AutoModel does: a class of the text part alone
        config = getattr(config, "decoder", None) or config.get_text_config()
    return config


def _own(entry: Entry) -> dict[str, Any]:
    own = OVERRIDES.get(entry.model_type, {}) | OVERRIDES.get(entry.model_class, {})
    return own | (VARIANTS[entry.model_type][entry.variant] if entry.variant else {})


def not_text(entry: Entry) -> str:
    """Why a class cannot compute rows of text alone; "" if it can."""
    return str(_own(entry).get("_no_text", ""))


def packed_whole(entry: Entry) -> bool:
    """Whether a packed row's oracle is the whole row, since the model itself is another for a document alone."""
    return bool(_own(entry).get("_packed"))


def needs_mask(entry: Entry) -> bool:
    """Whether a class needs a 2-D mask in one process even where nothing is padded."""
    return bool(_own(entry).get("_mask"))


def implementation(entry: Entry) -> str:
    """The attention of one process: eager, but for a class in which it gives padding other numbers than the default."""
    return "sdpa" if _own(entry).get("_sdpa") else "eager"


def known_inert(entry: Entry) -> dict[str, str]:
    """Thresholds that nothing in the class reads, and why."""
    known: dict[str, str] = _own(entry).get("_inert", {})
    return known


def shrunk(config_class: Any, own: dict[str, Any], changes: dict[str, Any], causal: bool) -> dict[str, Any]:
    """What to give to a config's class: sizes by name, thresholds, no dropout, and ``own`` over all of it."""
    default = config_class(**copy.deepcopy(own.get("_defaults", {})))  # some take their dicts apart
    default.allow_global_per_layer_attribute_access = True
    names = {name for name in vars(default) if not name.startswith("_")} | set(default.attribute_map)
    values: dict[str, Any] = {}
    for name in sorted(names):
        old = getattr(default, name, None)
        if name in default.attribute_map and default.attribute_map[name] in names:
            continue
        if isinstance(old, PreTrainedConfig):
            part = own.get(name, {}) if isinstance(own.get(name), dict) else {}
            values[name] = shrunk(type(old), part, changes, causal)
            if "model_type" in vars(type(old)) and old.model_type:
                values[name] = {"model_type": old.model_type, **values[name]}
        elif isinstance(old, (int, float)) and not isinstance(old, bool) and ("drop" in name or "jitter" in name):
            values[name] = type(old)(0)
        elif name == "sliding_window" and not isinstance(old, bool):
            values[name] = THRESHOLDS[name]
        elif name in ("use_sliding_window", "is_decoder"):
            values[name] = name != "is_decoder" or causal
        elif name in THRESHOLDS and isinstance(old, int) and not isinstance(old, bool):
            values[name] = THRESHOLDS[name]
        elif name in KV_HEADS and old is not None:
            values[name] = _kv_heads(default, old)
        elif name in SIZES and isinstance(old, (int, float)):
            values[name] = SIZES[name]
    values.update(_layers(default, own))
    values.update({name: x for name, x in own.items() if not name.startswith("_") and not isinstance(x, dict)})
    values.update({name: x for name, x in own.items() if isinstance(x, dict) and name not in values})
    for name, x in changes.items():
        if name in values or name in names:
            values[name] = x
    return values


def _kv_heads(default: Any, old: int) -> int:
    """As the default does: one, as many as query heads, or a share of them."""
    heads = getattr(default, "num_attention_heads", None)
    return 4 if old == heads else min(old, 2)


def _layers(default: Any, own: dict[str, Any]) -> dict[str, Any]:
    """As few layers as show every kind of layer that the default has."""
    depth: int = getattr(default, "num_hidden_layers", None) or 0
    lists = {
        name: list(x)
        for name, x in vars(default).items()
        if isinstance(x, (list, tuple)) and depth and len(x) == depth and name not in own
    }
    if not lists or "num_hidden_layers" in own:
        return {}
    if set(lists.get("layer_types", ())) == {"full_attention"} and "sliding_window" in vars(default):
        lists["layer_types"][-1] = "sliding_attention"
    seen: dict[Any, int] = {}
    for at in range(depth):
        for name, x in lists.items():
            seen.setdefault((name, repr(x[at])), at)
    chosen = sorted(set(seen.values()))
    if len(chosen) < 2:
        chosen = [0, depth - 1]
    kept = {name: [x[at] for at in chosen] for name, x in lists.items()}
    return {**kept, "num_hidden_layers": len(chosen)}


def build(entry: Entry, attention: str, **changes: Any) -> PreTrainedModel:
    """A model with random weights, the same for every attention: large ones, and no entry is left at 0 or 1."""
    config = tiny_config(entry, **changes)
    model_class: Any = getattr(transformers, entry.model_class)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PreTrainedModel = model_class._from_config(config, attn_implementation=attention, dtype=torch.float32)
    randomise(model, _own(entry).get("_weights", {}))
    model.train()
    return model


def randomise(model: nn.Module, scales: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(0.2 * noise)
            else:
                parameter.nan_to_num_().add_(0.1 * noise)
            for part, scale in scales.items():
                parameter.mul_(scale if part in name else 1.0)


def thresholds(config: Any) -> Iterable[str]:
    """The mechanisms of a config that begin below 12 tokens, by entry."""
    parts = [config, *(x for x in vars(config).values() if isinstance(x, PreTrainedConfig))]
    text = [part for part in parts if "vision" not in part.model_type and "audio" not in part.model_type]
    return sorted({name for part in text for name in THRESHOLDS if isinstance(vars(part).get(name), int)})


def rope_changes(entry: Entry) -> dict[str, Any]:
    """Makes RoPE depend on the longest position of the batch, where the config has RoPE that can; else nothing."""
    config = tiny_config(entry)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or "default" not in _types(rope) or _own(entry).get("_rope"):
        return {}
    return {"rope_parameters": _dynamic(rope), "max_position_embeddings": 8}


def _types(rope: dict[str, Any]) -> set[str]:
    parts = [x for x in rope.values() if isinstance(x, dict)] or [rope]
    return {str(part.get("rope_type")) for part in parts}


def _dynamic(rope: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(x, dict) for x in rope.values()):
        return {name: _dynamic(x) if isinstance(x, dict) else x for name, x in rope.items()}
    if rope.get("rope_type") != "default":
        return rope
    kept = {name: x for name, x in rope.items() if name in ("rope_theta", "mrope_section")}
    if "partial_rotary_factor" in rope:
        kept["partial_rotary_factor"] = max(rope["partial_rotary_factor"], 0.5)  # of 8: it divides by the width less 2
    return {**kept, "rope_type": "dynamic", "factor": 2.0}
