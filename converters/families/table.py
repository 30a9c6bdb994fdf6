"""What a model family declares about its checkpoints.

Owns the shape of a family's table. Knows no family. The one decision: a table is made from one checkpoint's own
config, so layout facts are read, cross-checked and recorded instead of assumed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from converters.rules import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Tie:
    """Two names of one parameter."""

    tensor: str
    """The name that may be absent; where present it must be bit-identical to `same_as`."""
    same_as: str
    """The name that carries the parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyTable:
    """How the checkpoints of one family map to the leaves of its Flax model."""

    family: str
    facts: Mapping[str, Any]
    """Layout facts (rope style, norm offset, tie, eps, ...), JSON values; written to the manifest."""
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    """Templates of source tensors that carry no parameter (values the model computes itself)."""
    ties: tuple[Tie, ...] = ()
    hints: Mapping[str, str] = field(default_factory=dict)
    """Why a leaf may be unfilled or a tensor unwanted, by its name or template."""
    prefixes: tuple[str, ...] = ()
    """Leading components (`model.`, `bert.`) that one checkpoint of the family has and another lacks."""
    carried: tuple[str, ...] = ()
    """Templates of source tensors that the Flax model does not use and that go back unchanged (counters, say)."""
    blocks: tuple[tuple[str, str], ...] = ()
    """Templates of torch module path and Flax module path whose outputs are the same activation; the Flax side taps
    it. In the order in which they run."""
