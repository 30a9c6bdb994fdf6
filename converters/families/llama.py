"""Llama checkpoints as transformers writes them (SmolLM2, TinyLlama, Llama 2 and 3).

Owns the rule table of the family and its layout facts. Knows nothing of files. The one decision: torch and Flax use the
same half-split rotary layout and the same norm convention, so the table is renames and transposes alone; nothing is
permuted and no constant is folded into a weight.
"""

from collections.abc import Collection, Mapping
from typing import Any

from converters.families.table import FamilyTable, Tie
from converters.operations import Transpose
from converters.rules import Rule
from pipeline.errors import ConversionError
from pipeline.models.llama import LlamaConfig

_KERNEL = Transpose((1, 0))
"""torch Linear keeps [out, in], the Flax kernel is [in, out]."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LAYER = "model.layers.{layer}"

_NOT_LLAMA = {
    "quantization_config": "quantized weights need their scales; dequantize the checkpoint first",
    "sliding_window": "attention windows are not computed by the Llama model",
    "num_local_experts": "expert layers are not computed by the Llama model",
}
"""Config keys that, when set, mean another computation than the plain Llama's."""


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ConversionError: the config asks for something that a plain Llama does not compute; lists every such key.
        ParameterError: a size is missing or does not divide, or the activation or rope scaling is unknown.
    """
    complaints = [f"  {key} = {config[key]!r}: {why}" for key, why in _NOT_LLAMA.items() if config.get(key)]
    if complaints:
        raise ConversionError("config.json does not describe a plain Llama:\n" + "\n".join(complaints))
    parsed = LlamaConfig.from_dict(config)
    is_tied = parsed.tie_word_embeddings
    return FamilyTable(
        family="llama",
        facts=_facts(parsed),
        rules=_rules(parsed),
        ignored=("model.rotary_emb.inv_freq", _LAYER + ".self_attn.rotary_emb.inv_freq"),
        ties=(Tie(tensor=_HEAD, same_as=_EMBEDDING),) if is_tied else (),
        hints={
            "lm_head.kernel": "config.json says tie_word_embeddings: false; if this model shares its embedding with "
            "its head, set it to true there",
            _LAYER + ".self_attn.{projection:word}.bias": "config.json says attention_bias: "
            f"{str(parsed.attention_bias).lower()}",
            _LAYER + ".mlp.{projection:word}.bias": f"config.json says mlp_bias: {str(parsed.mlp_bias).lower()}",
        },
    )


def _rules(config: LlamaConfig) -> tuple[Rule, ...]:
    rules = [
        Rule.one(_EMBEDDING, "embed_tokens.embedding"),
        Rule.one(_LAYER + ".input_layernorm.weight", "layers.{layer}.input_norm.scale"),
        Rule.one(_LAYER + ".post_attention_layernorm.weight", "layers.{layer}.post_attention_norm.scale"),
        Rule.one("model.norm.weight", "norm.scale"),
    ]
    for theirs, ours, projections, has_bias in (
        ("self_attn", "attention", _ATTENTION, config.attention_bias),
        ("mlp", "mlp", _MLP, config.mlp_bias),
    ):
        for projection in projections:
            source, target = f"{_LAYER}.{theirs}.{projection}", "layers.{layer}." + f"{ours}.{projection}"
            rules.append(Rule.one(f"{source}.weight", f"{target}.kernel", _KERNEL))
            if has_bias:
                rules.append(Rule.one(f"{source}.bias", f"{target}.bias"))
    if not config.tie_word_embeddings:
        rules.append(Rule.one(_HEAD, "lm_head.kernel", _KERNEL))
    return tuple(rules)


def _facts(config: LlamaConfig) -> dict[str, Any]:
    return {
        "activation": "silu",
        "attention_bias": config.attention_bias,
        "embedding_scale": 1.0,
        "gate_up_layout": "separate",
        "head_dim": config.head_dim,
        "kernel_layout": "in, out",
        "mlp_bias": config.mlp_bias,
        "norm": "rms",
        "norm_eps": config.rms_norm_eps,
        "norm_offset": 0.0,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "qkv_layout": "separate",
        "rope_layout": "half-split",
        "rope_theta": config.rotary.theta,
        "rope_type": config.rotary.kind,
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "vocab_padding": 0,
    }
