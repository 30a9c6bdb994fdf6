"""What the tables of decoder families are made of.

Owns the rules of a norm and of the head, and the facts of a decoder. Knows no family. The one decision: torch and
Flax use the same half-split rotary layout, and scales and offsets stay in the forward pass, so rules rename, transpose,
split and stack, and no constant is folded into a weight.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from converters.families.layer_rules import LINEAR, layer_norm
from converters.families.table import FamilyTable, Tie
from converters.rules import Rule
from pipeline.models.decoders.config import DecoderConfig

OURS = "layers.{layer}"


def norm(source: str, target: str, *, config: DecoderConfig) -> list[Rule]:
    """The rules of a norm: its scale as stored, and its bias where it has one."""
    if config.norm.kind == "layer":
        return layer_norm(source, target)
    return [Rule.one(f"{source}.weight", f"{target}.scale")]


def decoder_table(
    config: DecoderConfig,
    *,
    rules: Sequence[Rule],
    embedding: str,
    head: str,
    blocks: Sequence[tuple[str, str]],
    prefix: str,
    ignored: Sequence[str] = (),
    hints: dict[str, str] | None = None,
    **layout: Any,
) -> FamilyTable:
    """A decoder's table.

    Args:
        config: of the checkpoint.
        rules: of everything but the head.
        embedding: name of the token embedding.
        head: name of the output head, tied or not.
        blocks: see `FamilyTable.blocks`.
        prefix: of the names; the bare model, saved on its own, lacks it.
        ignored: see `FamilyTable.ignored`.
        hints: see `FamilyTable.hints`.
        layout: facts about the file that are not in the config.
    """
    is_tied = config.tie_word_embeddings
    untied_hint = (
        "config.json says tie_word_embeddings: false; if this model shares its embedding with its head, set it to "
        "true there"
    )
    return FamilyTable(
        family=config.family,
        facts=_facts(config, **layout),
        rules=(*rules, *(() if is_tied else (Rule.one(head, "lm_head.kernel", LINEAR),))),
        ignored=tuple(ignored),
        ties=(Tie(tensor=head, same_as=embedding),) if is_tied else (),
        hints={"lm_head.kernel": untied_hint, **(hints or {})},
        prefixes=(prefix,),
        blocks=tuple(blocks),
    )


def _facts(config: DecoderConfig, **layout: Any) -> dict[str, Any]:
    rotaries = list(dict.fromkeys(layer.rotary for layer in config.layers if layer.rotary is not None))
    facts: dict[str, Any] = {
        "activation": config.activation,
        "attention_scales": sorted({layer.scale for layer in config.layers}),
        "attention_softcap": config.attention_softcap,
        "attention_windows": [layer.window for layer in config.layers],
        "embedding_scale": config.embedding_scale,
        "experts": None if config.experts is None else asdict(config.experts),
        "expert_layers": [index for index, layer in enumerate(config.layers) if layer.has_experts],
        "gate_up_layout": "separate" if config.is_gated else "not gated",
        "head_dim": config.head_dim,
        "kernel_layout": "in, out",
        "logit_softcap": config.logit_softcap,
        "mlp_bias": config.mlp_bias,
        "norm": config.norm.kind,
        "norm_eps": config.norm.eps,
        "norm_offset": config.norm.offset,
        "norm_places": config.norm_places,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "output_bias": config.output_bias,
        "positions": "learned" if config.learns_positions else "rotary",
        "qk_norm": config.qk_norm,
        "qkv_bias": config.qkv_bias,
        "qkv_layout": "separate",
        "residual": "parallel" if config.is_parallel else "sequential",
        "ropes": [asdict(rotary) for rotary in rotaries],
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "vocab_padding": 0,
    }
    if rotaries:
        facts["rope_layout"] = "half-split"
    if len(rotaries) == 1:
        facts |= {"rope_type": rotaries[0].kind, "rope_theta": rotaries[0].theta}
    return {**facts, **layout}
