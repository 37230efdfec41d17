"""Small random models of transformers, one of each kind of attention that tests need."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.helpers.models.biased_models import BiasedLlama
from tests.helpers.models.embedder import Embedder

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

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip

SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6, "num_kv_shared_layers": 4,
    "sliding_window": 7, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
"""Two layers make keys and values, and four attend to theirs."""

INDEXED = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "head_dim": 8, "first_k_dense_replace": 9, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "n_shared_experts": 1, "index_topk": 6,
    "index_head_dim": 8, "index_n_heads": 32,
}  # fmt: skip
"""Each query attends to 6 keys. With few index heads many scores are 0, of which no one can say which is chosen."""

EXPERTS = {
    "num_local_experts": 3, "n_routed_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "experts_implementation": "eager",
}  # fmt: skip
ON_WHOLE_DOCUMENTS: dict[str, tuple[str | type[PreTrainedModel], dict[str, Any], str]] = {
    "inkling": (
        "InklingForCausalLM",
        {
            **EXPERTS, "layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse"],
            "sliding_window_size": 7, "rel_extent": 9, "d_rel": 4, "log_scaling_n_floor": 6, "swa_head_dim": 8,
            "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
        },
        "sdpa",
    ),
    "minimax m3": (
        "MiniMaxM3VLForCausalLM",
        {
            **EXPERTS, "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"],
            "dense_intermediate_size": 48, "shared_intermediate_size": 16, "index_n_heads": 2, "index_head_dim": 8,
            "index_block_size": 4, "index_topk_blocks": 2,
        },
        "sdpa",
    ),
    "deepseek v4": (
        "DeepseekV4ForCausalLM",
        {
            **EXPERTS, "num_hidden_layers": 3, "num_key_value_heads": 1, "q_lora_rank": 16, "o_lora_rank": 8,
            "o_groups": 2, "hc_mult": 2, "index_n_heads": 32, "index_head_dim": 8, "index_topk": 3, "sliding_window": 7,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["moe"] * 3,
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5},
        },
        "eager",
    ),
    "glm 5.3": (
        "Glm5NextForConditionalGeneration",
        {"vision_config": {"depth": 1, "hidden_size": 8, "num_heads": 1}, "text_config": {
            **SIZES, "num_hidden_layers": 4, "num_key_value_heads": 4, "hc_mult": 2, "linear_head_dim": 8,
            "linear_num_heads": 2, "qk_rope_head_dim": 0, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16,
            "kv_lora_rank": 16, "mlp_layer_types": ["dense"] * 4,
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "indexer_types": ["full", "full", "shared", "full"], "index_n_heads": 32, "index_head_dim": 8,
            "index_topk": 6, "index_kpool": 3,
        }},
        "sdpa",
    ),
}  # fmt: skip
"""Those with attention that a ring does not know."""

STILL = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
MODERN = {"num_labels": 3, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}

OF_WHOLE_ROWS: dict[str, tuple[str | type[PreTrainedModel], dict[str, Any], str]] = {
    "llama of rows": ("LlamaForSequenceClassification", {"num_labels": 3}, "sdpa"),
    "llama of scores": ("LlamaForSequenceClassification", {"num_labels": 1}, "sdpa"),
    "llama of tokens": ("LlamaForTokenClassification", {"num_labels": 3, "classifier_dropout": 0.0}, "sdpa"),
    "llama of spans": ("LlamaForQuestionAnswering", {}, "sdpa"),
    "bert of rows": ("BertForSequenceClassification", {**STILL, "num_labels": 3}, "sdpa"),
    "bert of tokens": ("BertForTokenClassification", {**STILL, "num_labels": 3}, "sdpa"),
    "bert of pairs": ("BertForPreTraining", STILL, "sdpa"),
    "electra of replaced tokens": ("ElectraForPreTraining", {**STILL, "embedding_size": 32}, "sdpa"),
    "bert of masked tokens": ("BertForMaskedLM", STILL, "sdpa"),
    "esm of masked tokens": ("EsmForMaskedLM", STILL, "sdpa"),
    "modernbert of rows": ("ModernBertForSequenceClassification", {**MODERN, "classifier_pooling": "mean"}, "sdpa"),
    "modernbert of masked tokens": ("ModernBertForMaskedLM", MODERN, "sdpa"),
    "modernbert of the masked tokens alone": ("ModernBertForMaskedLM", {**MODERN, "sparse_prediction": True}, "sdpa"),
    "modernbert of embeddings": (Embedder, MODERN, "sdpa"),
}
"""Those whose loss is not the causal one: of a row, of each token, of masked tokens, of embeddings."""
MODELS: dict[str, tuple[str | type[PreTrainedModel], dict[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", {}, "sdpa"),
    "learned biases": (BiasedLlama, {}, "sdpa"),
    "mistral": ("MistralForCausalLM", {"sliding_window": 7}, "sdpa"),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 7, "query_pre_attn_scalar": 8}, "eager"),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 7, "query_pre_attn_scalar": 8}, "eager"),
    "gemma3 both ways": (
        "Gemma3ForCausalLM",
        {"sliding_window": 7, "query_pre_attn_scalar": 8, "use_bidirectional_attention": True},
        "eager",
    ),
    "bert": (
        "BertLMHeadModel", {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}, "sdpa",
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {
            **SHARED, "intermediate_size": [48] * 6, "activation_sparsity_pattern": [0.9, *[0.0] * 5], "laurel_rank": 8,
            "pad_token_id": None,  # its embedding would be 0, of which the model takes a square root: gradients are nan
        },
        "eager",
    ),
    "gemma4": ("Gemma4ForCausalLM", {**SHARED, "global_head_dim": 16}, "eager"),
    "gpt_oss": (
        "GptOssForCausalLM", {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2}, "eager",
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
            "router_aux_loss_coef": 0.5, "sliding_window": None,
        },
        "sdpa",
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1,
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "output_router_logits": True,
        },
        "sdpa",
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
    "deepseek_v32": ("DeepseekV32ForCausalLM", INDEXED, "sdpa"),
    "glm_moe_dsa": (
        "GlmMoeDsaForCausalLM",
        {**INDEXED, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
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
    "longrope in each layer": ("MoshiForCausalLM", {"ffn_dim": 48, "rope_parameters": LONG_ROPE}, "sdpa"),
    "qwen3_5": ("Qwen3_5ForCausalLM", {**LINEAR, "head_dim": 16}, "sdpa"),
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "sdpa"),
    "granite": (
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 2, "mamba_d_head": 16,
            "mamba_expand": 1, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8,
            "num_local_experts": 0, "shared_intermediate_size": 48,
        },
        "sdpa",
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention"], "block_size": 8, "num_local_experts": 3,
            "num_experts_per_tok": 2, "experts_implementation": "eager",
        },
        "sdpa",
    ),
    "recurrent gemma": (
        "RecurrentGemmaForCausalLM",
        {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 7}, "sdpa",
    ),
    "zaya": (
        "ZayaForCausalLM",
        {
            "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 7, "num_experts": 2,
            "experts_implementation": "eager", "moe_intermediate_size": 16, "router_hidden_size": 16,
        },
        "sdpa",
    ),
    **ON_WHOLE_DOCUMENTS,
    **OF_WHOLE_ROWS,
    "mamba": ("MambaForCausalLM", {"state_size": 8, "time_step_rank": 4, "expand": 1}, "eager"),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 8, "n_groups": 2, "chunk_size": 8}, "eager",
    ),
}  # fmt: skip
"""Name: class, what its config has beyond `SIZES`, and transformers' own attention that can compute it."""

IMAGE, BEFORE_IMAGE, VIDEO = 95, 93, 96
TEXT = {**SIZES, "num_hidden_layers": 3}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 4}
EAR = {"num_mel_bins": 8, "max_source_positions": 16, "initializer_range": 0.2}
QWEN = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEFORE_IMAGE, "vision_end_token_id": 94,
    "text_config": {
        **TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
}  # fmt: skip
QWEN_TOWER = {
    **TOWER, "depth": 2, "num_heads": 2, "out_hidden_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3 vision": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                **TEXT, "sliding_window": 7, "query_pre_attn_scalar": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": {**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16},
            "mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": BEFORE_IMAGE,
            "eoi_token_index": 94,
        },
    ),
    "qwen2.5 vision": (
        "Qwen2_5_VLForConditionalGeneration",
        {**QWEN, "vision_config": {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1], "in_channels": 3}},
    ),
    "qwen3 vision": (
        "Qwen3VLForConditionalGeneration",
        {**QWEN, "vision_config": {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}},
    ),
    "qwen3.5 vision": (
        "Qwen3_5ForConditionalGeneration",
        {
            **QWEN, "vision_config": {**QWEN_TOWER, "num_position_embeddings": 16},
            "text_config": {
                **TEXT, **LINEAR, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "head_dim": 16, "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "mrope_interleaved": True,
                    "partial_rotary_factor": 0.5,
                },
            },
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {
                **TEXT, "model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2, "dropout": 0.0,
                "attention_dropout": 0.0, "tie_word_embeddings": False,
            },
            "vision_config": {
                **TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 8,
            },
            "image_token_id": IMAGE, "image_seq_length": 4, "tie_word_embeddings": False,
        },
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"}, "audio_token_id": IMAGE,
            "audio_config": {**EAR, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1,
                             "num_attention_heads": 2},
        },
    ),
    "qwen2 audio": (
        "Qwen2AudioForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"}, "audio_token_index": IMAGE,
            "audio_config": {**EAR, "d_model": 16, "encoder_ffn_dim": 24, "encoder_layers": 1,
                             "encoder_attention_heads": 2},
        },
    ),
    "glm asr": (
        "GlmAsrForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"}, "audio_token_id": IMAGE,
            "audio_config": {**EAR, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1,
                             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
        },
    ),
    "flamingo": (
        "AudioFlamingo3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"}, "audio_token_id": IMAGE,
            "audio_config": {**EAR, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
                             "num_attention_heads": 2},
        },
    ),
}  # fmt: skip
"""Name: class and config of a model that takes images, or sound."""


def tiny(name: str, attention: str | None = None, **config: Any) -> PreTrainedModel:
    """A model with the same random weights each time.

    Args:
        attention: attn_implementation; None is transformers' own.
        config: entries of its config, in place of those above.
    """
    if name in VISION:
        kind, own = VISION[name]
        model = build(kind, attention or "sdpa", **{**own, **config})
        for parameter in model.parameters():  # Gemma 3's projector begins as zeros, with which images change nothing
            if parameter.dim() > 1 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.2)
        return model
    one, own, reference = MODELS[name]
    return build(one, attention or reference, **{**SIZES, **own, **config})


def build(kind: str | type[PreTrainedModel], attention: str = "ring_fp32", **config: Any) -> PreTrainedModel:
    """A model by its class, or its class's name in transformers, with a config of its class."""
    torch.manual_seed(0)
    model_class: Any = getattr(transformers, kind) if isinstance(kind, str) else kind
    own = copy.deepcopy(config)  # a config writes into its dicts, and the next test has the same
    model: PreTrainedModel = model_class._from_config(model_class.config_class(**own), attn_implementation=attention)
    return model
