"""GPT-2 checkpoints.

Owns the rule table. Knows nothing of files. The one decision: GPT-2 keeps its kernels as [in, out] (transformers'
Conv1D), as Flax does, so none is transposed; its square kernels would take a transpose without a word.
"""

from collections.abc import Collection, Mapping
from typing import Any

from converters.families.decoder_rules import OURS, decoder_table, norm
from converters.families.fused_projections import fused_qkv
from converters.families.table import FamilyTable
from converters.rules import Rule
from pipeline.models.decoders.readers import read_decoder

_PREFIX = "transformer."
"""The first published files lack it."""
_LAYER = _PREFIX + "h.{layer}"
_KERNELS = {"attn.c_proj": "attention.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: a size is missing or does not divide, or the config asks for what is not computed.
    """
    parsed = read_decoder(config)
    rules = [
        Rule.one(f"{_PREFIX}wte.weight", "embed_tokens.embedding"),
        Rule.one(f"{_PREFIX}wpe.weight", "embed_positions.embedding"),
        *norm(f"{_PREFIX}ln_f", "norm", config=parsed),
        *norm(f"{_LAYER}.ln_1", f"{OURS}.input_norm", config=parsed),
        *norm(f"{_LAYER}.ln_2", f"{OURS}.post_attention_norm", config=parsed),
        *fused_qkv(f"{_LAYER}.attn.c_attn", config=parsed, order="blocks", kernel=(), has_bias=True),
    ]
    for theirs, ours in _KERNELS.items():
        rules.append(Rule.one(f"{_LAYER}.{theirs}.weight", f"{OURS}.{ours}.kernel"))
        rules.append(Rule.one(f"{_LAYER}.{theirs}.bias", f"{OURS}.{ours}.bias"))
    return decoder_table(
        parsed,
        rules=rules,
        embedding=f"{_PREFIX}wte.weight",
        head="lm_head.weight",
        blocks=(("transformer.wte", "embed_tokens"), ("transformer.h.{layer}", OURS), ("transformer.ln_f", "norm")),
        # The causal mask, kept as a buffer by older versions.
        ignored=(f"{_LAYER}.attn.bias", f"{_LAYER}.attn.masked_bias"),
        prefix=_PREFIX,
        qkv_layout="fused: all q, all k, all v",
        source_kernel_layout="in, out",
    )
