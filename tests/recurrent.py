"""Configurations of tiny models with recurrent layers, for the tests that ask for them by name."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
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
MORE: dict[str, dict[str, Any]] = {
    "qwen3_next": _COMMON
    | {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "num_experts": 0,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "moe_intermediate_size": 64,
        "mlp_only_layers": [],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "kimi_linear": _COMMON
    | {
        "rope_theta": 10000.0,
        "num_experts": 0,
        "moe_intermediate_size": 64,
        "kv_lora_rank": 32,
        "model_max_length": 4096,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "linear_attn_config": {"kda_layers": [1, 3], "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4},
    },
    "granitemoehybrid": _COMMON
    | {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.18,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_proj_bias": False,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "mamba2": _COMMON
    | {
        "num_heads": 4,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "state_size": 32,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
    },
    "plamo2": _COMMON
    | {
        "hidden_size_per_head": 32,
        "attention_window_size": 4096,
        "full_attention_idx": [1],
        "mamba_d_state": 32,
        "mamba_num_heads": 2,
        "num_hidden_layers": 4,
    },
    "mamba": _COMMON
    | {
        "num_hidden_layers": 2,
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "lfm2_moe": _COMMON
    | {
        "tie_word_embeddings": True,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "num_dense_layers": 2,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "full_attn_idxs": [1, 3],
    },
}
