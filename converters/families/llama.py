"""Llama checkpoints as transformers writes them, and the families that share their names.

Owns the rule table of Llama (SmolLM2, TinyLlama, Llama 2 and 3), Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text) and
OLMo 2. Knows nothing of files. The one decision: what these families compute differently is in the config alone; their
tensors differ only in which of the same names they have.
"""

from collections.abc import Collection, Mapping
from typing import Any

from converters.families.decoder_rules import OURS, decoder_table, norm
from converters.families.layer_rules import linear
from converters.families.table import FamilyTable
from converters.rules import Rule
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.readers import read_decoder

BLOCKS = (("model.embed_tokens", "embed_tokens"), ("model.layers.{layer}", OURS), ("model.norm", "norm"))
PREFIX = "model."
LAYER = PREFIX + OURS
HEAD = "lm_head.weight"
_EMBEDDING = PREFIX + "embed_tokens.weight"


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: a size is missing or does not divide, or the config asks for what is not computed.
    """
    parsed = read_decoder(config)
    return finished(parsed, rules=[*outer_rules(parsed), *attention_rules(parsed), *mlp_rules(parsed)])


def finished(config: DecoderConfig, *, rules: list[Rule], **layout: Any) -> FamilyTable:
    """The table of a family whose embedding, norm and head have Llama's names; `layout` are more facts of the file."""
    return decoder_table(
        config,
        rules=rules,
        embedding=_EMBEDDING,
        head=HEAD,
        blocks=BLOCKS,
        ignored=(f"{PREFIX}rotary_emb.inv_freq", f"{LAYER}.self_attn.rotary_emb.inv_freq"),
        hints={
            f"{LAYER}.self_attn.{{projection:word}}.bias": "config.json says attention_bias: "
            f"{str(config.qkv_bias).lower()}",
            f"{LAYER}.mlp.{{projection:word}}.bias": f"config.json says mlp_bias: {str(config.mlp_bias).lower()}",
        },
        prefix=PREFIX,
        **layout,
    )


def outer_rules(config: DecoderConfig) -> list[Rule]:
    """Embedding and norms."""
    rules = [
        Rule.one(_EMBEDDING, "embed_tokens.embedding"),
        *norm(f"{PREFIX}norm", "norm", config=config),
    ]
    names = {
        "before": ("input", "post_attention"),
        "after": ("post_attention", "post_feedforward"),
        "around": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    }[config.norm_places]
    for name in names:
        rules += norm(f"{LAYER}.{name}_layernorm", f"{OURS}.{name}_norm", config=config)
    return rules


def attention_rules(config: DecoderConfig) -> list[Rule]:
    """Separate projections, and the norms of queries and keys where there are any."""
    rules = []
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        has_bias = config.output_bias if projection == "o_proj" else config.qkv_bias
        rules += linear(f"{LAYER}.self_attn.{projection}", f"{OURS}.attention.{projection}", has_bias=has_bias)
    if config.qk_norm != "none":
        for name in ("q_norm", "k_norm"):
            rules += norm(f"{LAYER}.self_attn.{name}", f"{OURS}.attention.{name}", config=config)
    return rules


def mlp_rules(config: DecoderConfig) -> list[Rule]:
    """Separate gate, up and down."""
    rules = []
    for projection in ("gate_proj", "up_proj", "down_proj"):
        rules += linear(f"{LAYER}.mlp.{projection}", f"{OURS}.mlp.{projection}", has_bias=config.mlp_bias)
    return rules
