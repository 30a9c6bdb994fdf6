"""Tiny random transformers decoders that break every symmetry, one config a family, and their checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCABULARY = 101
NUM_LAYERS = 2
LENGTH = 29
"""Longer than every window, than half a dozen of them, and than the original length of every scaling."""
# Heads differ in number from key-value heads, the head size is no power of two, nothing is square but q and o.
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WIDE_HEADS = {**SHAPE, "head_dim": 10}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 48,
    "n_layer": NUM_LAYERS,
    "n_head": 8,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
NEOX = {name: value for name, value in {**SHAPE, "hidden_size": 80}.items() if name != "num_key_value_heads"}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **settings}}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 0.5}
LONGROPE = {
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 2.0, 4.0],
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**WIDE_HEADS, "tie_word_embeddings": True, **rope("default")}),
    "llama-biased": ("LlamaForCausalLM", {**SHAPE, "attention_bias": True, "mlp_bias": True, **rope("default")}),
    "llama-dynamic": (
        "LlamaForCausalLM",
        {**SHAPE, "max_position_embeddings": 16, **rope("dynamic", factor=3.0)},
    ),
    "llama-llama3": ("LlamaForCausalLM", {**SHAPE, **rope("llama3", **LLAMA3)}),
    "llama-yarn": ("LlamaForCausalLM", {**SHAPE, **rope("yarn", **YARN)}),
    "mistral": ("MistralForCausalLM", {**WIDE_HEADS, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", {**SHAPE, "tie_word_embeddings": True, **rope("default")}),
    "qwen2-windows": (
        "Qwen2ForCausalLM",
        {**SHAPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**WIDE_HEADS, "attention_bias": True, **rope("default")}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **WIDE_HEADS,
            "sliding_window": 5,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **WIDE_HEADS,
            "sliding_window": 5,
            "query_pre_attn_scalar": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": GEMMA3_ROPE,
            "final_logit_softcapping": 4.0,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {**SHAPE, "sliding_window": 7, **rope("default", partial_rotary_factor=0.7)}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {**SHAPE, "original_max_position_embeddings": 16, **rope("longrope", **LONGROPE)},
    ),
    "gpt2": ("GPT2LMHeadModel", {**GPT2}),
    "gpt2-scaled": (
        "GPT2LMHeadModel",
        {**GPT2, "n_inner": 50, "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", {**NEOX, **rope("default", partial_rotary_factor=0.6)}),
    "gpt-neox-sequential": (
        "GPTNeoXForCausalLM",
        {**NEOX, "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {**WIDE_HEADS, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            **WIDE_HEADS,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-normalized": (
        "Qwen3MoeForCausalLM",
        {
            **WIDE_HEADS,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", {**SHAPE, **rope("default")}),
}
"""Class and config by case; every family of the table has at least one."""


def tiny_decoder(case: str, **overrides: Any) -> torch.nn.Module:
    """A random model whose every tensor differs from every other, norms and biases included."""
    kind, given = CASES[case]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**{**given, **overrides})
    config._attn_implementation = "eager"
    torch.manual_seed(sum(map(ord, case)))
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            # Norms near their neutral value would hide a swap; those of Gemma are stored minus one.
            parameter.copy_(
                noise * 0.3 + (1.0 if "norm" in name or "ln_" in name else 0.0) if noise.dim() == 1 else noise * 0.2
            )
    return model.eval()


def saved(directory: Path, model: torch.nn.Module) -> Path:
    """A checkpoint as `save_pretrained` writes it."""
    model.save_pretrained(directory)
    return directory


def tokens_of(batch: int = 2, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (batch, length)).astype(np.int32)
