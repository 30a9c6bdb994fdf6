"""What GGUF calls the tensors of each family, and what its metadata say in transformers' words.

Owns one row an architecture. Knows nothing of files. The one decision: a row undoes exactly what llama.cpp's
`convert_hf_to_gguf.py` does to that architecture (names, the rotary order of a Llama's queries and keys, the one that
is added to Gemma's norms, GPT-2's transposed kernels), and what a row does not know is refused, never dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from converters.gguf_rope import RopeFacts, rope_parameters

Reader = Callable[[str], Any]
"""A metadata value by its key without the architecture (`attention.head_count`), None where there is none."""

HEADS, KEY_VALUE_HEADS = "num_attention_heads", "num_key_value_heads"


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFamily:
    """One architecture of GGUF."""

    model_type: str
    architecture: str
    names: Mapping[str, str]
    """Template of the tensor's name in transformers by that in GGUF, `.weight` and `.bias` left out."""
    expert_names: Mapping[str, str] = field(default_factory=dict)
    """The same for tensors that hold all experts of a layer; `{expert}` counts along their first axis."""
    sizes: Mapping[str, str]
    """Key of the config by key of the metadata; all are required."""
    constants: Mapping[str, Any]
    """What every model of the family has in its config."""
    optional: Mapping[str, str] = field(default_factory=dict)
    """As `sizes`, where the metadata may lack it."""
    rotary_rows: Mapping[str, str] = field(default_factory=dict)
    """GGUF names whose rows are in interleaved rotary order, with the config key that counts their heads."""
    offset_norms: bool = False
    """One is added to the weights of norms."""
    transposed: tuple[str, ...] = ()
    """GGUF names whose kernels transformers keeps as [in, out]."""
    special: Callable[[dict[str, Any], Reader], dict[str, Any]] = lambda config, read: {}
    """What remains of the config, from what is known of it and the metadata."""
    has_rope: bool = True


_ATTENTION = {
    "blk.{layer}.attn_q": "model.layers.{layer}.self_attn.q_proj",
    "blk.{layer}.attn_k": "model.layers.{layer}.self_attn.k_proj",
    "blk.{layer}.attn_v": "model.layers.{layer}.self_attn.v_proj",
    "blk.{layer}.attn_output": "model.layers.{layer}.self_attn.o_proj",
}
_HEAD_NORMS = {
    "blk.{layer}.attn_q_norm": "model.layers.{layer}.self_attn.q_norm",
    "blk.{layer}.attn_k_norm": "model.layers.{layer}.self_attn.k_norm",
}
_MLP = {
    "blk.{layer}.ffn_gate": "model.layers.{layer}.mlp.gate_proj",
    "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.up_proj",
    "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.down_proj",
}
_NORMS = {
    "blk.{layer}.attn_norm": "model.layers.{layer}.input_layernorm",
    "blk.{layer}.ffn_norm": "model.layers.{layer}.post_attention_layernorm",
}
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FOUR_NORMS = {
    "blk.{layer}.attn_norm": "model.layers.{layer}.input_layernorm",
    "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "blk.{layer}.ffn_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    "blk.{layer}.post_ffw_norm": "model.layers.{layer}.post_feedforward_layernorm",
}
_DENSE = {**_ENDS, **_NORMS, **_ATTENTION, **_MLP}
_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": HEADS,
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
_DENSE_SIZES = {**_SIZES, "feed_forward_length": "intermediate_size"}
_LLAMA_ROWS = {"blk.{layer}.attn_q": HEADS, "blk.{layer}.attn_k": KEY_VALUE_HEADS}
_QWEN_MLP = {"blk.{layer}.ffn_gate_inp": "model.layers.{layer}.mlp.gate"}
_SILU = {"hidden_act": "silu"}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}


def _qwen3_moe(config: dict[str, Any], read: Reader) -> dict[str, Any]:
    return {"moe_intermediate_size": read("expert_feed_forward_length"), "intermediate_size": _dense_width(read)}


def _dense_width(read: Reader) -> Any:
    """Of layers without experts, which these models do not have; the config needs some number."""
    return read("feed_forward_length") or read("expert_feed_forward_length")


def _gemma_scalar(config: dict[str, Any], *, widest: int) -> int:
    """What queries are divided by the root of: the head size, but in the 27B model (llama.cpp, `llama-model.cpp`)."""
    is_widest = config["num_hidden_layers"] == widest
    return int(config["hidden_size"] // config[HEADS] if is_widest else config["head_dim"])


def _gemma2(config: dict[str, Any], read: Reader) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    return {
        "query_pre_attn_scalar": _gemma_scalar(config, widest=46),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in layers],
        "attn_logit_softcapping": read("attn_logit_softcapping"),
        "final_logit_softcapping": read("final_logit_softcapping"),
    }


def _gemma3(config: dict[str, Any], read: Reader) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    pattern = int(read("attention.sliding_window_pattern") or 6)
    local = {"rope_type": "default", "rope_theta": float(read("rope.freq_base_swa") or 10_000.0)}
    return {
        "query_pre_attn_scalar": _gemma_scalar(config, widest=62),
        "layer_types": ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in layers],
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "attn_logit_softcapping": None,
        "final_logit_softcapping": read("final_logit_softcapping"),
    }


_LLAMA = GgufFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=_DENSE,
    sizes=_DENSE_SIZES,
    constants={**_SILU, "mlp_bias": False},
    rotary_rows=_LLAMA_ROWS,
)
_MIXTRAL = GgufFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names={
        **_ENDS,
        **_NORMS,
        **_ATTENTION,
        "blk.{layer}.ffn_gate_inp": "model.layers.{layer}.block_sparse_moe.gate",
    },
    expert_names={
        "blk.{layer}.ffn_gate_exps": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
        "blk.{layer}.ffn_down_exps": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
        "blk.{layer}.ffn_up_exps": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
    },
    sizes={**_DENSE_SIZES, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    constants={**_SILU, "sliding_window": None, "router_jitter_noise": 0.0},
    rotary_rows=_LLAMA_ROWS,
)
GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "qwen2": GgufFamily(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        names=_DENSE,
        sizes=_DENSE_SIZES,
        constants={**_SILU, "use_sliding_window": False},
    ),
    "qwen3": GgufFamily(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        names={**_DENSE, **_HEAD_NORMS},
        sizes=_DENSE_SIZES,
        constants={**_SILU, "use_sliding_window": False},
    ),
    "qwen3moe": GgufFamily(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        names={**_ENDS, **_NORMS, **_ATTENTION, **_HEAD_NORMS, **_QWEN_MLP},
        expert_names={
            f"blk.{{layer}}.ffn_{kind}_exps": f"model.layers.{{layer}}.mlp.experts.{{expert}}.{kind}_proj"
            for kind in ("gate", "up", "down")
        },
        sizes={**_SIZES, "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        constants={
            **_SILU,
            "use_sliding_window": False,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        special=_qwen3_moe,
    ),
    "olmo2": GgufFamily(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        names={
            **_ENDS,
            **_ATTENTION,
            **_HEAD_NORMS,
            **_MLP,
            "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
            "blk.{layer}.post_ffw_norm": "model.layers.{layer}.post_feedforward_layernorm",
        },
        sizes=_DENSE_SIZES,
        constants=_SILU,
    ),
    "phi3": GgufFamily(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        names={
            **_ENDS,
            **_NORMS,
            "blk.{layer}.attn_qkv": "model.layers.{layer}.self_attn.qkv_proj",
            "blk.{layer}.attn_output": "model.layers.{layer}.self_attn.o_proj",
            "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.gate_up_proj",
            "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.down_proj",
        },
        sizes=_DENSE_SIZES,
        constants=_SILU,
        optional={
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
    ),
    "gemma2": GgufFamily(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        names={**_ENDS, **_ATTENTION, **_MLP, **_FOUR_NORMS},
        sizes={**_DENSE_SIZES, "attention.sliding_window": "sliding_window"},
        constants=_GEMMA,
        offset_norms=True,
        special=_gemma2,
    ),
    "gemma3": GgufFamily(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        names={**_ENDS, **_ATTENTION, **_HEAD_NORMS, **_MLP, **_FOUR_NORMS},
        sizes={**_DENSE_SIZES, "attention.sliding_window": "sliding_window"},
        constants=_GEMMA,
        offset_norms=True,
        special=_gemma3,
    ),
    "gpt2": GgufFamily(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        names={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
            "blk.{layer}.attn_norm": "transformer.h.{layer}.ln_1",
            "blk.{layer}.attn_qkv": "transformer.h.{layer}.attn.c_attn",
            "blk.{layer}.attn_output": "transformer.h.{layer}.attn.c_proj",
            "blk.{layer}.ffn_norm": "transformer.h.{layer}.ln_2",
            "blk.{layer}.ffn_up": "transformer.h.{layer}.mlp.c_fc",
            "blk.{layer}.ffn_down": "transformer.h.{layer}.mlp.c_proj",
        },
        sizes={
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "attention.head_count": "n_head",
            "context_length": "n_positions",
            "feed_forward_length": "n_inner",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        constants={"activation_function": "gelu_new"},
        transposed=("blk.{layer}.attn_qkv", "blk.{layer}.attn_output", "blk.{layer}.ffn_up", "blk.{layer}.ffn_down"),
        has_rope=False,
    ),
}


def gguf_family(metadata: Mapping[str, Any]) -> GgufFamily:
    """The row of the file's architecture; `llama` is Mistral's as well, and with experts Mixtral's.

    Raises:
        ValueError: no row has it; names the allowed ones.
    """
    architecture = metadata.get("general.architecture")
    if architecture == "llama":
        return _MIXTRAL if metadata.get("llama.expert_count") else _LLAMA
    found = GGUF_FAMILIES.get(str(architecture))
    if found is None:
        raise ValueError(
            f"general.architecture is {architecture!r}; allowed: {', '.join(sorted(['llama', *GGUF_FAMILIES]))}"
        )
    return found


def gguf_config(metadata: Mapping[str, Any], *, vocab_size: int, is_tied: bool, rope: RopeFacts) -> dict[str, Any]:
    """The transformers config of the model in a file.

    Args:
        metadata: of the file.
        vocab_size: rows of its embedding.
        is_tied: whether it has no head of its own.
        rope: what its tensors say of rotary frequencies.

    Raises:
        ValueError: a key is missing or of the wrong kind, or the rotary scaling is unknown; lists every complaint.
    """
    family = gguf_family(metadata)
    architecture = str(metadata["general.architecture"])

    def read(key: str) -> Any:
        return metadata.get(f"{architecture}.{key}")

    complaints = [
        f"{architecture}.{key} is {str(read(key))[:40]}" for key in family.sizes if not _is_size(key, read(key))
    ]
    if complaints:
        raise ValueError(f"its metadata do not describe a {family.model_type}: {', '.join(complaints)}")
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": vocab_size,
        "tie_word_embeddings": is_tied,
        **{ours: read(theirs) for theirs, ours in family.sizes.items()},
        **{ours: read(theirs) for theirs, ours in family.optional.items() if read(theirs) is not None},
        **family.constants,
        **{
            f"{name}_token_id": metadata.get(f"tokenizer.ggml.{name_in_file}_token_id")
            for name, name_in_file in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    }
    if family.has_rope:
        width = int(read("attention.key_length") or read("rope.dimension_count") or 0)
        config["head_dim"] = width or config["hidden_size"] // config[HEADS]
        config[KEY_VALUE_HEADS] = int(read("attention.head_count_kv") or config[HEADS])
        config["attention_bias"] = rope.has_attention_bias
        config["rope_parameters"] = rope_parameters(read, rope=rope, head_dim=config["head_dim"])
    return {**config, **family.special(config, read)}


def _is_size(key: str, value: Any) -> bool:
    is_number = type(value) is float if key.endswith("epsilon") else type(value) is int
    return is_number and 0 < value < 1 << 40
