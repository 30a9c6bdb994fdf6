"""Checkpoints of families with experts: Mixtral and Qwen3-MoE.

Owns the rule table. Knows nothing of files. The one decision: a file may hold each expert apart, as `save_pretrained`
writes them, or stacked, as transformers 5 has them in memory and a training checkpoint keeps them; its names tell
which, the manifest records it, and the way back is the same.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from converters.families.decoder_rules import OURS
from converters.families.layer_rules import LINEAR, linear
from converters.families.llama import LAYER, attention_rules, finished, mlp_rules, outer_rules
from converters.families.table import FamilyTable
from converters.list_operations import Each, Stack
from converters.operations import Split, Transpose
from converters.rules import Rule
from pipeline.models.decoders.config import DecoderConfig, Experts
from pipeline.models.decoders.readers import read_decoder

_KERNELS = Transpose((0, 2, 1))
"""Stacked [expert, out, in] to [expert, in, out]."""
_STACKED = "mlp.experts.gate_up_proj"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    """What files with the experts apart call them."""

    block: str
    gate: str
    up: str
    down: str


_APART: Mapping[str, _Names] = {
    "mixtral": _Names(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    "qwen3_moe": _Names(block="mlp", gate="gate_proj", up="up_proj", down="down_proj"),
}


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: a size is missing or does not divide, or the config asks for what is not computed.
    """
    parsed = read_decoder(config)
    is_stacked = any(name.endswith(_STACKED) for name in names)
    rules = [*outer_rules(parsed), *attention_rules(parsed)]
    if parsed.experts is not None and any(kind.has_experts for kind in parsed.layers):
        rules += _stacked(parsed.experts) if is_stacked else _apart(parsed, parsed.experts)
    if not all(kind.has_experts for kind in parsed.layers):
        rules += mlp_rules(parsed)
    layout = "stacked, gate and up fused" if is_stacked else "apart"
    return finished(parsed, rules=rules, expert_layout=layout)


def _stacked(experts: Experts) -> list[Rule]:
    inner, ours = experts.intermediate_size, f"{OURS}.mlp.experts"
    return [
        *linear(f"{LAYER}.mlp.gate", f"{OURS}.mlp.router", has_bias=False),
        Rule(
            sources=(f"{LAYER}.{_STACKED}",),
            targets=(f"{ours}.gate_proj.kernel", f"{ours}.up_proj.kernel"),
            operations=(_KERNELS, Split(axis=2, sizes=(inner, inner))),
        ),
        Rule.one(f"{LAYER}.mlp.experts.down_proj", f"{ours}.down_proj.kernel", _KERNELS),
    ]


def _apart(config: DecoderConfig, experts: Experts) -> list[Rule]:
    theirs = _APART[config.family]
    rules = linear(f"{LAYER}.{theirs.block}.gate", f"{OURS}.mlp.router", has_bias=False)
    for name, ours in ((theirs.gate, "gate_proj"), (theirs.up, "up_proj"), (theirs.down, "down_proj")):
        rules.append(
            Rule(
                sources=tuple(
                    f"{LAYER}.{theirs.block}.experts.{number}.{name}.weight" for number in range(experts.num)
                ),
                targets=(f"{OURS}.mlp.experts.{ours}.kernel",),
                # Transposed before they are stacked: the stack is then the only copy beside what was read.
                operations=(Each((LINEAR,) * experts.num), Stack(experts.num)),
            )
        )
    return rules
