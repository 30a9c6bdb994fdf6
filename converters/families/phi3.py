"""Phi-3 checkpoints: Llama's names, with queries, keys and values in one tensor, and gate and up in one.

Owns the rule table. Knows nothing of files. The one decision: the fused tensors are split on the way in and joined on
the way back; the module keeps them apart like every other family's.
"""

from collections.abc import Collection, Mapping
from typing import Any

from converters.families.decoder_rules import OURS
from converters.families.fused_projections import fused_qkv
from converters.families.layer_rules import LINEAR, linear
from converters.families.llama import LAYER, finished, outer_rules
from converters.families.table import FamilyTable
from converters.operations import Split
from converters.rules import Rule
from pipeline.models.decoders.readers import read_decoder


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: a size is missing or does not divide, or the config asks for what is not computed.
    """
    parsed = read_decoder(config)
    inner = parsed.intermediate_size
    rules = [
        *outer_rules(parsed),
        *fused_qkv(f"{LAYER}.self_attn.qkv_proj", config=parsed, order="blocks", kernel=(LINEAR,), has_bias=False),
        *linear(f"{LAYER}.self_attn.o_proj", f"{OURS}.attention.o_proj", has_bias=False),
        Rule(
            sources=(f"{LAYER}.mlp.gate_up_proj.weight",),
            targets=(f"{OURS}.mlp.gate_proj.kernel", f"{OURS}.mlp.up_proj.kernel"),
            operations=(LINEAR, Split(axis=1, sizes=(inner, inner))),
        ),
        *linear(f"{LAYER}.mlp.down_proj", f"{OURS}.mlp.down_proj", has_bias=False),
    ]
    return finished(parsed, rules=rules, qkv_layout="fused: all q, all k, all v", gate_up_layout="fused: gate, up")
