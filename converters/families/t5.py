"""T5 checkpoints as transformers writes them (T5, T5 v1.1, Flan-T5), whole or the encoder alone.

Owns the rule table of the family and its layout facts. Knows nothing of files.
"""

from collections.abc import Collection, Mapping
from typing import Any

from converters.families.layer_rules import KERNEL_LAYOUTS, embedding, linear
from converters.families.table import FamilyTable, Tie
from converters.rules import Rule
from pipeline.models.encoders.t5_config import T5Config

_SHARED, _HEAD = "shared.weight", "lm_head.weight"
_PROJECTIONS = ("q", "k", "v", "o")
_UNREAD_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""In the first T5 checkpoints; no version of the model reads it."""


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: the config asks for what the module does not compute.
    """
    parsed = T5Config.from_dict(config)
    stacks = ("encoder", "decoder") if parsed.has_decoder else ("encoder",)
    rules = [embedding("shared", "shared")]
    for stack in stacks:
        rules += _stack_rules(stack, is_decoder=stack == "decoder", is_gated=parsed.is_gated)
    ties = [Tie(tensor=f"{stack}.embed_tokens.weight", same_as=_SHARED) for stack in stacks]
    if parsed.has_decoder and parsed.is_tied:
        ties.append(Tie(tensor=_HEAD, same_as=_SHARED))
    elif parsed.has_decoder:
        rules += linear("lm_head", "lm_head", has_bias=False)
    return FamilyTable(
        family="t5",
        facts=_facts(parsed),
        rules=tuple(rules),
        ties=tuple(ties),
        hints={
            "lm_head.kernel": "config.json says tie_word_embeddings: false; if this model shares its embedding with "
            "its head, set it to true there, and scale_decoder_outputs to false if the model is a T5 v1.1"
        },
        carried=(_UNREAD_BIAS,) if parsed.has_decoder else (),
        blocks=tuple(
            pair
            for stack in stacks
            for pair in (
                (f"{stack}.block.{{layer}}", f"{stack}.blocks.{{layer}}"),
                (f"{stack}.final_layer_norm", f"{stack}.norm"),
            )
        ),
    )


def _stack_rules(stack: str, *, is_decoder: bool, is_gated: bool) -> list[Rule]:
    layer, ours = f"{stack}.block.{{layer}}.layer", f"{stack}.blocks.{{layer}}"
    # The first layer's table serves the whole stack.
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
    parts = [("0.SelfAttention", "attention"), *([("1.EncDecAttention", "cross_attention")] if is_decoder else [])]
    last = len(parts)
    norms = ["attention_norm", *(["cross_norm"] if is_decoder else []), "mlp_norm"]
    rules = [embedding(bias, f"{stack}.position_bias"), _norm(f"{stack}.final_layer_norm", f"{stack}.norm")]
    rules += [_norm(f"{layer}.{index}.layer_norm", f"{ours}.{norm}") for index, norm in enumerate(norms)]
    for theirs, mine in parts:
        for projection in _PROJECTIONS:
            rules += linear(f"{layer}.{theirs}.{projection}", f"{ours}.{mine}.{projection}_proj", has_bias=False)
    for name in ("wi_0", "wi_1", "wo") if is_gated else ("wi", "wo"):
        rules += linear(f"{layer}.{last}.DenseReluDense.{name}", f"{ours}.mlp.{name}", has_bias=False)
    return rules


def _norm(source: str, target: str) -> Rule:
    return Rule.one(f"{source}.weight", f"{target}.scale")


def _facts(config: T5Config) -> dict[str, Any]:
    return {
        "activation": config.activation,
        "attention_scale": 1.0,
        "gated": config.is_gated,
        "head_dim": config.d_kv,
        "kernel_layout": KERNEL_LAYOUTS["linear"],
        "norm": "rms",
        "norm_eps": config.layer_norm_epsilon,
        "norm_places": "before",
        "num_attention_heads": config.num_heads,
        "num_decoder_layers": config.num_decoder_layers if config.has_decoder else 0,
        "num_hidden_layers": config.num_layers,
        "output_scale": config.d_model**-0.5 if config.scale_decoder_outputs else 1.0,
        "position_buckets": config.relative_attention_num_buckets,
        "position_max_distance": config.relative_attention_max_distance,
        "positions": "bias by distance",
        "tie_word_embeddings": config.is_tied,
        "vocab_size": config.vocab_size,
    }
