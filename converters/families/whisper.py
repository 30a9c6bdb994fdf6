"""Whisper checkpoints as transformers writes them.

Owns the rule table of the family and its layout facts. Knows nothing of files.
"""

from collections.abc import Collection, Mapping
from typing import Any

from converters.families.layer_rules import KERNEL_LAYOUTS, conv1d, embedding, layer_norm, linear
from converters.families.table import FamilyTable, Tie
from converters.rules import Rule
from pipeline.models.encoders.whisper_config import LAYER_NORM_EPS, WhisperConfig

_MODEL, _HEAD, _TOKENS = "model.", "proj_out", "model.decoder.embed_tokens"
_PROJECTIONS = (("q_proj", "q_proj"), ("k_proj", "k_proj"), ("v_proj", "v_proj"), ("out_proj", "o_proj"))
_WITHOUT_BIAS = "k_proj"


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: the config asks for what the module does not compute.
    """
    parsed = WhisperConfig.from_dict(config)
    rules = [
        *conv1d(f"{_MODEL}encoder.conv1", "encoder.conv1"),
        *conv1d(f"{_MODEL}encoder.conv2", "encoder.conv2"),
        Rule.one(f"{_MODEL}encoder.embed_positions.weight", "encoder.positions"),
        embedding(_TOKENS, "decoder.embed_tokens"),
        embedding(f"{_MODEL}decoder.embed_positions", "decoder.positions"),
        *_stack_rules("encoder", attentions=(("self_attn", "attention"),)),
        *_stack_rules("decoder", attentions=(("self_attn", "attention"), ("encoder_attn", "cross"))),
    ]
    is_tied = parsed.tie_word_embeddings
    return FamilyTable(
        family="whisper",
        facts=_facts(parsed),
        rules=(*rules, *(() if is_tied else linear(_HEAD, _HEAD, has_bias=False))),
        ties=(Tie(tensor=f"{_HEAD}.weight", same_as=f"{_TOKENS}.weight"),) if is_tied else (),
        hints={
            "proj_out.kernel": "config.json says tie_word_embeddings: false; if this model shares its embedding with "
            "its head, set it to true there"
        },
        prefixes=(_MODEL, ""),
        blocks=tuple(
            pair
            for stack in ("encoder", "decoder")
            for pair in (
                (f"{_MODEL}{stack}.layers.{{layer}}", f"{stack}.layers.{{layer}}"),
                (f"{_MODEL}{stack}.layer_norm", f"{stack}.norm"),
            )
        ),
    )


def _stack_rules(stack: str, *, attentions: tuple[tuple[str, str], ...]) -> list[Rule]:
    layer, ours = f"{_MODEL}{stack}.layers.{{layer}}", f"{stack}.layers.{{layer}}"
    rules = layer_norm(f"{_MODEL}{stack}.layer_norm", f"{stack}.norm")
    for theirs, mine in attentions:
        attention = "attention" if mine == "attention" else "cross_attention"
        rules += layer_norm(f"{layer}.{theirs}_layer_norm", f"{ours}.{mine}_norm")
        for source, target in _PROJECTIONS:
            has_bias = source != _WITHOUT_BIAS
            rules += linear(f"{layer}.{theirs}.{source}", f"{ours}.{attention}.{target}", has_bias=has_bias)
    for name in ("fc1", "fc2"):
        rules += linear(f"{layer}.{name}", f"{ours}.mlp.{name}")
    return rules + layer_norm(f"{layer}.final_layer_norm", f"{ours}.mlp_norm")


def _facts(config: WhisperConfig) -> dict[str, Any]:
    return {
        "activation": config.activation_function,
        "attention_bias": "queries, values and outputs",
        "attention_scale": "head_dim ** -0.5",
        "kernel_layout": KERNEL_LAYOUTS["linear"],
        "kernel_layout_conv": KERNEL_LAYOUTS["conv1d"],
        "norm": "layer",
        "norm_eps": LAYER_NORM_EPS,
        "norm_places": "before",
        "num_attention_heads": config.encoder_attention_heads,
        "num_decoder_attention_heads": config.decoder_attention_heads,
        "num_decoder_layers": config.decoder_layers,
        "num_frames": config.num_frames,
        "num_hidden_layers": config.encoder_layers,
        "num_mel_bins": config.num_mel_bins,
        "positions": "stored sinusoids for sound, learned for tokens",
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
    }
