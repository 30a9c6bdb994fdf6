"""A stored decoder on several devices.

Owns where the parts of a decoder's stored leaves go. Knows nothing of serving. The one decision: a model with fewer
key-value heads than devices is placed as a model with one for each device, every head laid down several times; what a
device reads of such a leaf is the one head it needs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from jax.sharding import Sharding

from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.partition import is_key_value, num_copies_of_heads, widened
from pipeline.models.description import ModelKind
from pipeline.models.family import FamilyModel
from pipeline.models.parameter_reader import Index
from pipeline.models.placement import Layout


class LeafSharding(Protocol):
    """Where a leaf lies."""

    def __call__(self, path: str, shape: Sequence[int], *, config: DecoderConfig) -> Sharding:
        """Of the leaf at a dotted path; `config` is that of the model as it is placed."""
        ...


def is_decoder(description: object) -> bool:
    """True for a description of which `decoder_layout` gives a layout."""
    return isinstance(description, FamilyModel) and description.kind is ModelKind.CAUSAL_LM


def decoder_layout(description: FamilyModel, *, sharding: LeafSharding, tensor: int) -> Layout:
    """The layout of a decoder on `tensor` devices."""
    stored_config: DecoderConfig = description.parsed
    config = widened(stored_config, tensor=tensor)
    copies, head_dim = num_copies_of_heads(stored_config, tensor=tensor), config.head_dim

    def stored(path: str, index: Index) -> Index:
        if copies == 1 or not is_key_value(path, config=config):
            return index
        *lead, last = index
        first = last.start // (copies * head_dim)
        end = -(-last.stop // (copies * head_dim))
        return (*lead, slice(first * head_dim, end * head_dim))

    return Layout(
        description=replace(description, parsed=config),
        sharding=lambda path, shape: sharding(path, shape, config=config),
        stored=stored,
    )
