"""What a model family declares about its models.

Owns the shape of a row of the table of families, and the description such a row gives. Knows no family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from pipeline.models.description import Arrays, ModelKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model family: how its config is read and which module it makes."""

    model_type: str
    kind: Callable[[Any], ModelKind]
    """Of the parsed config: one family may have models with several heads."""
    config: Any
    """A class with `from_dict(config)`; raises `ParameterError` for what the module cannot compute."""
    module: Callable[..., nnx.Module]
    """`(parsed, *, rngs)`."""
    example_inputs: Callable[[Any, int], Arrays]
    """Of the parsed config and a seed; see `ModelDescription.example_inputs`."""
    forward: Callable[[Any, Mapping[str, Any]], dict[str, jax.Array]]
    """Of the module and the inputs; see `ModelDescription.forward`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyModel:
    """The `ModelDescription` of a checkpoint whose family is in the table."""

    family: Family
    parsed: Any

    @property
    def kind(self) -> ModelKind:
        """What it is for."""
        return self.family.kind(self.parsed)

    @property
    def name(self) -> str:
        """The family's `model_type`."""
        return self.family.model_type

    def abstract(self) -> nnx.Module:
        """The module without weights."""
        return nnx.eval_shape(lambda: self.family.module(self.parsed, rngs=_OneKey()))

    def example_inputs(self, *, seed: int) -> Arrays:
        """Random inputs by torch's keyword."""
        return self.family.example_inputs(self.parsed, seed)

    def forward(self, module: nnx.Module, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Outputs by torch's name."""
        return self.family.forward(module, inputs)


class _OneKey:
    """In place of `nnx.Rngs` where nothing is drawn: every stream gives the same key.

    `Rngs` counts its calls, and flax compares each count with the one before in a way that, while shapes are traced,
    walks the whole trace: 0.8 s for the 211 weights of SmolLM2 instead of 0.15 s, growing with their square.
    """

    def __init__(self) -> None:
        self._key = jax.random.key(0)

    def __call__(self) -> jax.Array:
        return self._key

    def __getattr__(self, stream: str) -> "_OneKey":
        return self
