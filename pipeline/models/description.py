"""What a model directory describes, whichever road its model came by.

Owns the seam between models and all who use them: conversion, parity, benches and serving. Knows no family. The one
decision: inputs and outputs have the names of the torch model's `forward` and of what it returns, so both frameworks
are given the same dict and answer with the same keys.

Shape suffixes are those of each model.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

import jax
from flax import nnx
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
"""By keyword of torch's `forward`: `input_ids`, `attention_mask`, `pixel_values`, ..."""


class ModelKind(StrEnum):
    """What a model is for; decides how it is compared and served."""

    CAUSAL_LM = "causal-lm"
    """Logits of the next token; generates text."""
    SEQ2SEQ_LM = "seq2seq-lm"
    """An encoder of text and a decoder with logits."""
    SPEECH_TO_TEXT = "speech-to-text"
    """An encoder of sound and a decoder with logits."""
    TEXT_ENCODER = "text-encoder"
    """Hidden states of tokens; embeddings, or a head on them."""
    IMAGE = "image"
    """Pixels to features or class logits."""
    IMAGE_TEXT = "image-text"
    """Two encoders into one space."""
    PREDICTOR = "predictor"
    """Arrays to arrays; any torch module."""


class ModelDescription(Protocol):
    """A model without its weights."""

    @property
    def kind(self) -> ModelKind:
        """What it is for."""
        ...

    @property
    def name(self) -> str:
        """The family's `model_type`, or `traced`."""
        ...

    def abstract(self) -> nnx.Module:
        """The module with `jax.ShapeDtypeStruct` leaves; allocates nothing."""
        ...

    def example_inputs(self, *, seed: int) -> Arrays:
        """Random inputs that break symmetries: several rows of several lengths, padding, no two values alike.

        Tokens are int32, masks int32 of zeros and ones, everything else float32.
        """
        ...

    def forward(self, module: nnx.Module, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Run `module` on `inputs` in evaluation mode; float outputs by torch's name. May be jitted by the caller."""
        ...
