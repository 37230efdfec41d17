"""Models with random weights, in the shapes of published ones: for time and memory, which weights do not change."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState, init_empty_weights
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    set_seed,
)

SHAPES: dict[str, dict[str, Any]] = {
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256,
            "num_attention_heads": 64, "num_key_value_heads": 8},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "vocab_size": 151936,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen3.5-9B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "vocab_size": 248320,
                   "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
                   "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "qwen3-30B-A3B": {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "vocab_size": 151936,
                      "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
                      "num_experts_per_tok": 8, "norm_topk_prob": True},
    "gpt-oss-20b": {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "vocab_size": 201088,
                    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
                    "num_experts_per_tok": 4, "sliding_window": 128},
    "tiny-experts": {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 259,
                     "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2},
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 259,
             "num_attention_heads": 2, "num_key_value_heads": 1},
}  # fmt: skip
"""Of Llama 3.1 70B, Qwen3 32B, Llama 3.1 8B, Llama 3.2 1B (untied), Qwen3.5 9B, which mixes attention with gated delta
rules, Qwen3 30B-A3B and gpt-oss 20b, which have experts, and of what two CPU cores train in seconds."""
KINDS: dict[str, Any] = {
    "32B": Qwen3Config, "qwen3.5-9B": Qwen3_5TextConfig, "qwen3-30B-A3B": Qwen3MoeConfig, "gpt-oss-20b": GptOssConfig,
    "tiny-experts": Qwen3MoeConfig,
}  # fmt: skip
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def config_of(shape: str, tokens: int, window: int | None = None, layers: int | None = None) -> Any:
    """The config of a shape for rows of so many tokens. Where layers attend to a window of tokens only, a Llama is
    a Mistral."""
    kind = KINDS.get(shape, MistralConfig if window else LlamaConfig)
    changes: dict[str, Any] = {} if layers is None else {"num_hidden_layers": layers}
    if window:
        changes["sliding_window"] = window
        if kind is Qwen3Config:
            changes |= {"use_sliding_window": True, "max_window_layers": 0}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500000.0}
    if kind is Qwen3_5TextConfig:
        rope["partial_rotary_factor"] = 0.25
    return kind(
        **{**SHAPES[shape], **changes}, max_position_embeddings=max(tokens, 131072), rms_norm_eps=1e-5,
        rope_parameters=rope, tie_word_embeddings=False, use_cache=False,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip


def random_model(config: Any, dtype: torch.dtype, attention: str) -> Any:
    """A model with random weights, which every rank draws alike and on its own device."""
    set_seed(0)
    with PartialState().device:  # 8 billion numbers take a second on a GPU, and minutes on a CPU
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def random_model_in_4_bits(config: Any, dtype: torch.dtype, attention: str) -> Any:
    """The same with linear layers in NF4 but the head, as `from_pretrained` makes it of 16-bit weights (QLoRA).

    One weight at a time is drawn and quantized: the 16-bit weights of a 70B model never are in memory together.
    """
    from transformers.integrations import replace_with_bnb_linear  # needs bitsandbytes

    device = PartialState().device
    quantization = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        **NF4, bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,  # else accelerate leaves 4-bit weights whole on each GPU
    )  # fmt: skip
    with init_empty_weights():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    replace_with_bnb_linear(model, ["lm_head"], quantization)
    set_seed(0)

    def drawn(name: str, shape: torch.Size) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=device, dtype=dtype)
        return torch.randn(shape, device=device, dtype=dtype) * config.initializer_range

    for module_name, module in model.named_modules():
        for name, old in list(module.named_parameters(recurse=False)):
            values = drawn(f"{module_name}.{name}", old.shape)
            more = {key: x for key, x in vars(old).items() if key not in ("data", "_is_hf_initialized")}
            module.register_parameter(name, type(old)(values, requires_grad=False, **more).to(device))
    model.is_loaded_in_4bit = True  # peft asks for it
    for part in model.modules():  # on some CPUs bitsandbytes packs weights in its first evaluation, and trains wrongly
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False
    return model.to(device)


def weights_in(parameter: nn.Parameter) -> int:
    """How many numbers it stands for: a 4-bit parameter holds two in a byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()
