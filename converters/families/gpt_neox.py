"""GPT-NeoX checkpoints (Pythia and its kin).

Owns the rule table. Knows nothing of files. The one decision: queries, keys and values lie head by head in one tensor,
so they are taken apart by heads; three equal pieces would have the right shapes and the wrong rows.
"""

from collections.abc import Collection, Mapping
from typing import Any

from converters.families.decoder_rules import OURS, decoder_table, norm
from converters.families.fused_projections import fused_qkv
from converters.families.layer_rules import LINEAR, linear
from converters.families.table import FamilyTable
from converters.rules import Rule
from pipeline.models.decoders.readers import read_decoder

_PREFIX = "gpt_neox."
_LAYER = _PREFIX + OURS
_HEADS = ("embed_out.weight", "lm_head.weight")
"""What files call the output head, and what transformers 5 calls it in memory."""


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: a size is missing or does not divide, or the config asks for what is not computed.
    """
    parsed = read_decoder(config)
    rules = [
        Rule.one(f"{_PREFIX}embed_in.weight", "embed_tokens.embedding"),
        *norm(f"{_PREFIX}final_layer_norm", "norm", config=parsed),
        *norm(f"{_LAYER}.input_layernorm", f"{OURS}.input_norm", config=parsed),
        *norm(f"{_LAYER}.post_attention_layernorm", f"{OURS}.post_attention_norm", config=parsed),
        *fused_qkv(
            f"{_LAYER}.attention.query_key_value",
            config=parsed,
            order="groups",
            kernel=(LINEAR,),
            has_bias=parsed.qkv_bias,
        ),
        *linear(f"{_LAYER}.attention.dense", f"{OURS}.attention.o_proj", has_bias=parsed.output_bias),
        *linear(f"{_LAYER}.mlp.dense_h_to_4h", f"{OURS}.mlp.up_proj", has_bias=True),
        *linear(f"{_LAYER}.mlp.dense_4h_to_h", f"{OURS}.mlp.down_proj", has_bias=True),
    ]
    return decoder_table(
        parsed,
        rules=rules,
        embedding=f"{_PREFIX}embed_in.weight",
        head=next((name for name in _HEADS if name in names), _HEADS[0]),
        blocks=(
            ("gpt_neox.embed_in", "embed_tokens"),
            ("gpt_neox.layers.{layer}", OURS),
            ("gpt_neox.final_layer_norm", "norm"),
        ),
        # The causal mask and the rotary frequencies, kept as buffers by older versions.
        ignored=(
            f"{_LAYER}.attention.bias",
            f"{_LAYER}.attention.masked_bias",
            f"{_LAYER}.attention.rotary_emb.inv_freq",
        ),
        prefix=_PREFIX,
        qkv_layout="fused: q, k, v of one head, then of the next",
    )
