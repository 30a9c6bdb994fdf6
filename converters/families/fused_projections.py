"""Projections that a file holds as one tensor, taken apart.

Owns the two orders in which queries, keys and values are found in one tensor. Knows no family. The one decision: the
order is a fact of the family's files that its table names; both orders have the same shape, so nothing could detect it.
"""

import math
from typing import Literal

from converters.families.decoder_rules import OURS
from converters.list_operations import Each
from converters.operations import Operation, Reshape, Shape, Split
from converters.rules import Rule
from pipeline.models.decoders.config import DecoderConfig

QkvOrder = Literal["blocks", "groups"]
"""`blocks`: all queries, all keys, all values (Phi-3, GPT-2). `groups`: for each key-value head its queries, its key
and its value, then the next head's (GPT-NeoX, where a group has one query)."""


def fused_qkv(
    source: str, *, config: DecoderConfig, order: QkvOrder, kernel: tuple[Operation, ...], has_bias: bool
) -> list[Rule]:
    """The rules of the one projection that makes queries, keys and values; `kernel` brings its weight to [in, out]."""

    def rule(theirs: str, ours: str, first: tuple[Operation, ...], leading: Shape) -> Rule:
        parts = split_qkv(
            order,
            num_heads=config.num_attention_heads,
            num_groups=config.num_key_value_heads,
            head_dim=config.head_dim,
            leading=leading,
        )
        return Rule(
            sources=(f"{source}.{theirs}",),
            targets=tuple(f"{OURS}.attention.{name}_proj.{ours}" for name in "qkv"),
            operations=(*first, *parts),
        )

    rules = [rule("weight", "kernel", kernel, (config.hidden_size,))]
    return rules + ([rule("bias", "bias", (), ())] if has_bias else [])


def split_qkv(
    order: QkvOrder, *, num_heads: int, num_groups: int, head_dim: int, leading: Shape
) -> tuple[Operation, ...]:
    """From one tensor [*leading, (num_heads + 2 num_groups) * head_dim] to queries, keys and values, heads last.

    Args:
        order: of the last axis.
        num_heads: query heads.
        num_groups: key-value heads.
        head_dim: numbers a head.
        leading: axes before: (hidden,) for a kernel, () for a bias.
    """
    last = len(leading)
    wide, narrow = num_heads * head_dim, num_groups * head_dim
    if order == "blocks":
        return (Split(axis=last, sizes=(wide, narrow, narrow)),)
    queries = num_heads // num_groups
    grouped = (*leading, num_groups, queries + 2, head_dim)
    parts = ((*leading, num_groups, count, head_dim) for count in (queries, 1, 1))
    return (
        Reshape(before=(*leading, wide + 2 * narrow), after=grouped),
        Split(axis=last + 1, sizes=(queries, 1, 1)),
        Each(tuple(Reshape(before=part, after=(*leading, math.prod(part[last:]))) for part in parts)),
    )
