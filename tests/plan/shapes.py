"""Shapes of models for the tests of `plan`: on the meta device, so they cost no memory."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AutoConfig

from hf_ring_attn.integration.model import loading
from hf_ring_attn.plan.reading import shape_of
from hf_ring_attn.plan.shape import ModelShape

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = {
    **LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_32B = {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "head_dim": 128,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
QWEN35_9B = {
    "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip

QWEN3_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS_20B = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}


def shape(entries: dict[str, Any]) -> ModelShape:
    values = dict(entries)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return shape_of(config, loading.empty_model(config))


@functools.cache
def llama_8b() -> ModelShape:
    return shape(LLAMA_8B)
