"""What the rules of `configs` cannot guess, by model type or class (a class's entries win): entries of the config.

Entries that begin with "_" are told to the sweep and not to the config: "_defaults" are needed to build the default
config at all, "_inert" names thresholds that the model's code never reads, with the reason, "_no_text" says why a class
cannot compute rows of text alone, "_packed" why a packed row is compared with itself in one process and not with its
documents alone, "_mask" why one process is given a mask of ones, "_rope" why it has no dynamic RoPE, "_sdpa" why its
attention in one process is sdpa and not eager, and "_weights" scales weights by a part of their names: Gemma 3n and 4
do not scale their scores, and with norms of 1 gradients by eager attention differ in float32 and float64 by 6e-6 and
5e-5. ZAYA's scores are 0 with its first weights.
"""

from __future__ import annotations

from typing import Any

HEADS = {"head_dim": 8, "num_key_value_heads": 2}
FOUR_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SHARED: dict[str, Any] = {"layer_types": FOUR_LAYERS, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
GEMMA4: dict[str, Any] = {**SHARED, "global_head_dim": 16, "hidden_size_per_layer_input": 8}
MILD = {"_weights": {"q_norm": 0.4, "k_norm": 0.4}}
GEMMA3N: dict[str, Any] = {
    **SHARED, **MILD, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
    "laurel_rank": 8,
}  # fmt: skip
ASSISTANT: dict[str, Any] = {
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "global_head_dim": 16,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": 20,
}  # fmt: skip
# Of 24 tokens rank 1 of 2 holds positions up to 17, so by itself it would choose the short factors.
LONG: dict[str, Any] = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 20}
UNMASKED = "its eager attention is causal only where a mask is given (transformers 5.17)"
NEEDS_A_TARGET = "drafts for another model: it needs that model's hidden states, keys and values"

MUSICGEN = {
    "_defaults": {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}},
}

OVERRIDES: dict[str, dict[str, Any]] = {
    # entries that have no default
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": {**HEADS, "num_experts": 4, "moe_topk": 2},
    "ministral": HEADS,
    "nemotron": HEADS,
    "deepseek_v2": {"num_experts_per_tok": 2},
    "esm": {"vocab_size": 97, "pad_token_id": 0, "mask_token_id": 3},
    "musicgen": MUSICGEN,
    "musicgen_melody": MUSICGEN,
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "ple_embed_dim": 8, "hc_lowrank": 8, "ngram_vocab_size_base": 97,
    },
    # every kind of layer, and RoPE that depends on the longest position
    "phi3": LONG,
    "phi4_multimodal": {
        **LONG, "audio_config": {"ext_pw_out_channel": 32, "nemo_conv_channels": 32, "num_blocks": 1},
        "vision_config": {"crop_size": 28},
    },
    "got_ocr2": {"vision_config": {"output_channels": 32, "image_size": 64}},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "moe_layers": [1],
        "num_hidden_layers": 2,
        "_packed": "its temperature grows with the place in the row, in one process too, and not in the document",
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"], "num_hidden_layers": 3,
        "index_n_heads": 2, "_sdpa": "it chooses keys among padding, which eager attention gives other numbers",
    },
    "inkling2_text": {"log_scaling_alpha": 30.0},
    "inkling2_loop_text": {"log_scaling_alpha": 1.0},
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention",
        ],
        "num_hidden_layers": 4, "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5},
        "index_topk": 3,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_groups": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "zaya": {
        "num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"], "num_hidden_layers": 2,
        "_weights": {"qk_norm.temp": 10.0},
    },
    "gemma3n_text": GEMMA3N,
    "gemma4_text": {**GEMMA4, **MILD},
    "gemma4_unified_text": {**GEMMA4, **MILD},
    "gemma4": {"text_config": GEMMA4, **MILD},
    "gemma4_unified": {"text_config": GEMMA4, **MILD},
    # sizes that must fit together
    "mamba2": {"head_dim": 16},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"], "num_hidden_layers": 2, "lru_width": 32,
        "_rope": "its code has one type of RoPE",
    },
    "zamba": {
        "attention_hidden_size": 64, "attention_head_dim": 16, "_weights": {"x_proj": 0.4},
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "kv_channels": 16, "use_mem_rope": True},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "neomme": {"head_dim": 16, "embedding_rank": 16},
    "reformer": {
        "is_decoder": True, "axial_pos_shape": [4, 6], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 2, "hash_seed": 0,
    },
    "ReformerForMaskedLM": {"is_decoder": False},
    "gemma4_assistant": {
        "_defaults": {"text_config": {**ASSISTANT, "model_type": "gemma4_text"}}, "text_config": ASSISTANT,
        "backbone_hidden_size": 32, "_no_text": NEEDS_A_TARGET,
    },
    "gemma4_unified_assistant": {
        "_defaults": {"text_config": {**ASSISTANT, "model_type": "gemma4_unified_text"}}, "text_config": ASSISTANT,
        "backbone_hidden_size": 32, "_no_text": NEEDS_A_TARGET,
    },
    "gemma3n": {"_no_text": "its vision tower is built by timm, which is not installed"},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 8},
    "roc_bert": {
        "pronunciation_vocab_size": 97, "shape_vocab_size": 97, "pronunciation_embed_dim": 8, "shape_embed_dim": 8,
    },
    "perceiver": {
        "num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 1, "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "minimax": {"head_dim": 8},
    "mixtral": {"head_dim": 8},
    "qwen3_next": {"head_dim": 16},
    "qwen3_5_text": {"head_dim": 16},
    "qwen3_5_moe_text": {"head_dim": 16},
    # thresholds that nothing reads
    "modernbert-decoder": {"_inert": {"local_attention": "sliding_window takes its place"}},
    "phimoe": {
        "rope_parameters": {**LONG_ROPE, "short_mscale": 1.2, "long_mscale": 1.3},
        "_inert": {"original_max_position_embeddings": "its RoPE reads the entry of rope_parameters"},
    },
    "nemotron_h": {"_inert": {"sliding_window": "nothing reads it"}},
    "moshi": {"_inert": {"sliding_window": "only its flash attention reads it"}, "_mask": UNMASKED},
}  # fmt: skip

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "esm": {"rotary positions": {"position_embedding_type": "rotary"}},
    "gemma2": {"attention both ways": {"use_bidirectional_attention": True}},
    "gemma3_text": {"attention both ways": {"use_bidirectional_attention": True}},
    "gemma4_text": {"attention both ways": {"use_bidirectional_attention": "all"}},
    "gemma4_unified_text": {"attention both ways": {"use_bidirectional_attention": "all"}},
    "granitemoehybrid": {
        "attention only": {
            "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "position_embedding_type": "rope",
        }
    },
    "llama4_text": {
        "no chunks, no temperature": {
            "layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "_packed": "",
            "attn_temperature_tuning": False,
            "_inert": {"attention_chunk_size": "switched off", "floor_scale": "switched off"},
        }
    },
    "minimax_m3_vl_text": {"full attention": {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}},
}  # fmt: skip
"""Model type: other models that its class makes, by name, with what their config has beyond the above."""
