"""Configurations of tiny models: the six that the suite runs, and more that soaks and tests of one kind use.

``SUITE`` covers the state kinds that models are made of most often; ``MORE`` every other combination of mlx-lm's cache
classes that runs at this size. Windows and attention chunks are shorter than a prompt of 37 tokens, one of them is no
divisor or multiple of a block of 8.
"""

from __future__ import annotations

from typing import Any

VOCAB = 320  # 256 bytes, 61 merges, 3 special tokens: every id has a token

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
SUITE: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"rope_theta": 10000.0, "num_hidden_layers": 2},
    "gemma3_text": _COMMON
    | {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32, "rope_theta": 10000.0},
    "qwen3_5": {
        "text_config": _COMMON
        | {
            "model_type": "qwen3_5_text",
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        }
    },
    "falcon_h1": _COMMON
    | {
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mamba_d_conv": 4,
        "mamba_d_head": 32,
        "mamba_d_ssm": 64,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "mamba_n_heads": 2,
        "rope_theta": 10000.0,
    },
    "nemotron_h": _COMMON
    | {
        "hybrid_override_pattern": ["M", "*", "-", "M"],
        "attention_bias": False,
        "mamba_num_heads": 2,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "lfm2": _COMMON
    | {
        "tie_word_embeddings": True,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
}
#: what the suite's models are called in config.json
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
}


_MLA: dict[str, Any] = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
_TWO = _COMMON | {"num_hidden_layers": 2, "rope_theta": 10000.0}
_EXPERTS: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_WINDOWED: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_LONGCAT = {
    **_MLA,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "zero_expert_type": "identity",
    "moe_topk": 1,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 2,
    "zero_expert_num": 1,
    "num_layers": 1,
    "max_position_embeddings": 4096,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
#: architectures that mlx-lm has not; the comment is as for ``MORE``
OWN: dict[str, dict[str, Any]] = {
    # CompressedCache: a window of 8 rows, alone, with the 3 best entries of 4 tokens each, with all entries of 8
    "deepseek_v4": {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-6,
        "sliding_window": 8,
        "compress_ratios": [0, 4, 8, 4],
        "compress_rope_theta": 160000.0,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 256},
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 3,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}
#: models that only tests of prediction heads need
HEADED: dict[str, dict[str, Any]] = {
    "glm4_moe": _TWO
    | {
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.5,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": _TWO
    | _MLA
    | {
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "num_experts_per_tok": 2,
        "q_lora_rank": 32,
    },
    "mimo": _TWO | {"num_nextn_predict_layers": 1},
}
#: by model_type; the comment says which cache classes make_cache() returns
MORE: dict[str, dict[str, Any]] = {
    # ArraysCache(2) of Mamba-1, KVCache
    "jamba": _COMMON
    | {
        "num_hidden_layers": 3,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "tie_word_embeddings": True,
    },
    "mamba": _TWO
    | {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": True,
    },
    # ArraysCache(2) of Mamba-2, KVCache
    "granitemoehybrid": _COMMON
    | {
        "num_hidden_layers": 3,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_expand": 1,
        "mamba_n_heads": 2,
        "mamba_d_head": 32,
        "mamba_proj_bias": False,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "tie_word_embeddings": True,
    },
    "mamba2": _TWO
    | {
        "num_heads": 4,
        "state_size": 32,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 1e9],
        "time_step_rank": 4,
        "tie_word_embeddings": True,
    },
    "plamo2": _TWO
    | {
        "hidden_size_per_head": 32,
        "mamba_d_state": 32,
        "mamba_num_heads": 2,
        "mamba_step": 2,
        "tie_word_embeddings": True,
    },
    # ArraysCache(4), KVCache of MLA's latent rows
    "kimi_linear": _TWO
    | _MLA
    | {
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 4096,
        "num_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 2,
    },
    # ArraysCache(2) or (4) of gated delta nets, KVCache
    "qwen3_next": _TWO
    | _EXPERTS
    | _DELTA
    | {
        "linear_num_value_heads": 4,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 2,
    },
    "olmo_hybrid": _TWO
    | _DELTA
    | {
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_5_moe": {
        "text_config": SUITE["qwen3_5"]["text_config"]
        | _EXPERTS
        | {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 2, "shared_expert_intermediate_size": 32}
    },
    "kimi_k3": {
        "text_config": _TWO
        | _MLA
        | {
            "model_type": "kimi_linear",
            "hidden_act": "situ",
            "linear_attn_config": {
                "kda_layers": [1],
                "full_attn_layers": [2],
                "num_heads": 2,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
            "q_lora_rank": 32,
            "num_experts": 2,
            "num_experts_per_token": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 2,
        }
    },
    "bailing_moe_v3": _TWO
    | _MLA
    | _EXPERTS
    | {
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "layer_group_size": 2,
        "q_lora_rank": 32,
        "num_key_value_heads": 2,
    },
    # ArraysCache(1) of linear attention with a fixed decay, KVCache (the first of MLA's rows)
    "bailing_hybrid": _TWO
    | _MLA
    | _EXPERTS
    | {
        "num_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "layer_group_size": 2,
        "group_norm_size": 1,
        "routed_scaling_factor": 1.0,
        "num_key_value_heads": 2,
    },
    "bailing_moe_linear": _TWO
    | _EXPERTS
    | {
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "layer_group_size": 2,
        "group_norm_size": 1,
        "num_key_value_heads": 2,
    },
    # ArraysCache(1) of short convolutions, KVCache
    "lfm2_moe": _TWO
    | _EXPERTS
    | {
        "norm_topk_prob": True,
        "use_expert_bias": False,
        "num_dense_layers": 1,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "full_attn_idxs": [1],
        "tie_word_embeddings": True,
    },
    # ArraysCache(2), RotatingKVCache: no layer sees all rows
    "recurrent_gemma": _COMMON
    | {
        "num_hidden_layers": 3,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "rope_theta": 10000.0,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
    # ArraysCache(3) alone
    "rwkv7": _TWO
    | {
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    # CacheList(ArraysCache(2), RotatingKVCache) and CacheList(ArraysCache(2), KVCache)
    "baichuan_m1": _TWO | {"sliding_window": 8, "sliding_window_layers": [0], "conv_window": 2},
    # CacheList(KVCache, KVCache)
    "longcat_flash": _LONGCAT | {"attention_method": "MLA", "attention_bias": False},
    "deepseek_v32": _TWO
    | _MLA
    | {
        "index_head_dim": 32,
        "index_n_heads": 2,
        "index_topk": 16,
        "q_lora_rank": 32,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 32,
    },
    # ArraysCache(1) of the last token ids, which takes three tokens to fill, and CacheList(KVCache, KVCache)
    "longcat_flash_ngram": _LONGCAT | {"ngram_vocab_size_ratio": 2, "emb_neighbor_num": 4, "emb_split_num": 2},
    # CacheList(KVCache) and CacheList(KVCache, KVCache)
    "minimax_m3_vl": {
        "text_config": _TWO
        | {
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rotary_dim": 16,
            "moe_layer_freq": [0, 0],
            "index_n_heads": 1,
            "index_head_dim": 16,
            "index_block_size": 8,
            "index_topk_blocks": 2,
            "sparse_attention_freq": [0, 1],
        }
    },
    # KVCache of MLA's latent rows
    "deepseek_v3": _TWO | _MLA | {"q_lora_rank": 32, "first_k_dense_replace": 2, "moe_intermediate_size": 32},
    # ChunkedKVCache, KVCache: masks hide earlier chunks of 12 tokens
    "llama4": {
        "text_config": _COMMON
        | {
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": 12,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
        }
    },
    # RotatingKVCache, KVCache
    "gpt_oss": _TWO | _WINDOWED | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "afmoe": _TWO | _WINDOWED | _EXPERTS | {"num_dense_layers": 1},
    "olmo3": _TWO | _WINDOWED,
    "cohere2": _TWO | {"layer_norm_eps": 1e-5, "logit_scale": 1.0, "sliding_window": 8, "sliding_window_pattern": 2},
    # twice as many caches as layers, and half as many
    "iquestloopcoder": _TWO | {"loop_window_size": 8},
    "gemma3n": {
        "text_config": _COMMON
        | {
            "model_type": "gemma3n_text",
            "intermediate_size": 64,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "sliding_window": 8,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
}

#: as INEXACT of tests/cache/test_equality.py, for MORE: architecture -> (bound, why, measured on x86-64)
MORE_INEXACT = {
    **{
        name: (2e-6, f"Mamba-2's chunked scan (ssm_attn) sums within chunks: {measured}")
        for name, measured in {"granitemoehybrid": "9.3e-7", "mamba2": "3.2e-7", "plamo2": "1.6e-7"}.items()
    },
    **{
        name: (2e-6, f"MLA multiplies in another order for one token than for several: {measured}")
        for name, measured in {
            "deepseek_v3": "8.3e-7",
            "deepseek_v32": "4.7e-7",
            "longcat_flash": "3.5e-7",
            "longcat_flash_ngram": "1.8e-7",
        }.items()
    },
    **{
        name: (2e-6, f"rows of a window or chunk stand at other offsets after another cut: {measured}")
        for name, measured in {
            "recurrent_gemma": "4.2e-7",
            "baichuan_m1": "3.5e-7",
            "gpt_oss": "4.7e-7",
            "afmoe": "3.2e-7",
            "olmo3": "3.3e-7",
            "cohere2": "2.4e-7",
            "iquestloopcoder": "2e-7",
            "gemma3n": "3.6e-7",
        }.items()
    },
    "bailing_hybrid": (1e-5, "its linear attention is a chunked scan, and MLA as above: 2.8e-6"),
}
#: how far logits and states may be off where drafts are verified, whatever the prompt's cuts; of no other by a bit
DRAFTS_INEXACT = {
    name: (bound, f"MLA multiplies in another order for one token than for several: {measured}")
    for name, (bound, measured) in {
        "kimi_linear": (5e-6, "1.5e-6"),
        "deepseek_v3": (1e-5, "4.1e-6"),
        "deepseek_v32": (2e-5, "8.4e-6"),
        "longcat_flash": (5e-5, "1.9e-5"),
        "bailing_moe_v3": (1e-5, "1.9e-6"),
        "kimi_k3": (1e-5, "9.9e-7"),
    }.items()
}
