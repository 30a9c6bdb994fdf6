"""What each decoder family's config class in transformers has where a config says nothing, and what it calls things.

Owns these two tables. Loads no framework. The one decision: they are data that a test holds against transformers' own
classes, so no default is ever guessed.
"""

from collections.abc import Mapping
from typing import Any

_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
_DENSE_QWEN = {**_QWEN, "num_key_value_heads": 32, "max_window_layers": 28}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
EVERYWHERE = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "hidden_act": "silu", "rope_theta": 10000.0}
"""Of every family that has the key, unless its own row says otherwise."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": _DENSE_QWEN,
    "qwen3": {**_DENSE_QWEN, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
    },
    "mixtral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gemma2": {
        **_GEMMA,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262208,  # published configs leave out what the class has
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
    },
    "phi3": {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "gpt2": {
        "max_position_embeddings": 1024,
        "norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
    },
    "gpt_neox": {
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "hidden_act": "gelu",
        "use_parallel_residual": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.25,
    },
    "olmo2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
}
"""Of the config classes of transformers 5; a key without a default there has none here."""

RENAMES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    "gpt_neox": {
        "norm_eps": "layer_norm_eps",
        "partial_rotary_factor": "rotary_pct",
        "rope_theta": "rotary_emb_base",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
}
"""A key's name in the family's config, by its usual name."""
