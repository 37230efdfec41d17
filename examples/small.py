"""A Llama that two CPU cores can train, with the same random weights in every process."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments, set_seed

from text import VOCABULARY


def small_llama(attention: str = "ring_fp32", layers: int = 2, width: int = 64) -> Any:
    """A LlamaForCausalLM with heads of 32, two query heads to a key head.

    Args:
        attention: what from_pretrained, too, calls attn_implementation.
        width: hidden size, a multiple of 64.
    """
    heads = width // 32
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=layers, hidden_size=width, intermediate_size=width * 3,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=2**17,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    set_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-untyped-call]


def checkpointing(on: bool) -> dict[str, Any]:
    """The option of a trainer for checkpointing, by its name since transformers 5.23 or by the name before that."""
    name = "activation_checkpointing"
    return {name if name in TrainingArguments.__dataclass_fields__ else "gradient_checkpointing": on}
