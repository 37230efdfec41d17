"""Small random models of transformers, one of each kind of attention that tests need."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 97
# Weights large enough that attention looks at some tokens and not at others: with 0.02 all scores are nearly 0.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", {}, "sdpa"),
    "mistral": ("MistralForCausalLM", {"sliding_window": 7}, "sdpa"),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 7, "query_pre_attn_scalar": 8}, "eager"),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 7, "query_pre_attn_scalar": 8}, "eager"),
    "gpt_oss": (
        "GptOssForCausalLM", {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2}, "eager",
    ),
    "gpt2": ("GPT2LMHeadModel", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, "sdpa"),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 12, "head_dim": 8, "first_k_dense_replace": 2,
        },
        "sdpa",
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {
            "attention_chunk_size": 7, "floor_scale": 4, "attn_scale": 0.5, "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1, "use_qk_norm": True,
        },
        "sdpa",
    ),
    "dynamic rope": (
        "LlamaForCausalLM",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "sdpa",
    ),
    "longrope": ("Phi3ForCausalLM", {"sliding_window": None, "rope_parameters": LONG_ROPE}, "sdpa"),
}  # fmt: skip
"""Name: class, what its config has beyond `SIZES`, and transformers' own attention that can compute it."""


def tiny(name: str, attention: str | None = None, **config: Any) -> PreTrainedModel:
    """A model with the same random weights each time.

    Args:
        attention: attn_implementation; None is transformers' own.
        config: entries of its config, in place of those above.
    """
    kind, own, reference = MODELS[name]
    return build(kind, attention or reference, **{**SIZES, **own, **config})


def build(kind: str, attention: str = "ring_fp32", **config: Any) -> PreTrainedModel:
    """A model by its class's name, with a config of its class."""
    torch.manual_seed(0)
    model_class: Any = getattr(transformers, kind)
    model: PreTrainedModel = model_class._from_config(model_class.config_class(**config), attn_implementation=attention)
    return model
