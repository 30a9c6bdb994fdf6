"""A stored decoder on several devices.

Owns where the parts of a decoder's stored leaves go. Knows nothing of serving. The one decision: a model with fewer
key-value heads than devices is placed as a model with one for each device, every head laid down several times; what a
device reads of such a leaf is the one head it needs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.model import Decoder
from pipeline.models.decoders.partition import is_key_value, num_copies_of_heads, widened
from pipeline.models.description import ModelKind
from pipeline.models.family import FamilyModel
from pipeline.models.parameter_reader import Index
from pipeline.models.placement import Layout
from pipeline.models.variables import LEAVES


class LeafSharding(Protocol):
    """Where a leaf lies."""

    def __call__(self, path: str, shape: Sequence[int], *, config: DecoderConfig) -> Sharding:
        """Of the leaf at a dotted path; `config` is that of the model as it is placed."""
        ...


def is_decoder(description: object) -> bool:
    """True for a description of which `decoder_layout` gives a layout."""
    return isinstance(description, FamilyModel) and description.kind is ModelKind.CAUSAL_LM


def widen(model: Decoder, *, tensor: int) -> Decoder:
    """Lay the key-value heads of a module in memory down as `decoder_layout` does, in place; gives the module back."""
    copies = num_copies_of_heads(model.config, tensor=tensor)
    if copies > 1:
        head_dim, model.config = model.config.head_dim, widened(model.config, tensor=tensor)
        for block in model.layers:
            block.attention.num_groups *= copies
        for path, variable in nnx.to_flat_state(nnx.state(model, LEAVES)):
            if is_key_value(".".join(map(str, path)), config=model.config):
                leaf = variable.get_value()
                heads = leaf.reshape(*leaf.shape[:-1], -1, head_dim)
                variable.set_value(jnp.repeat(heads, copies, axis=-2).reshape(*leaf.shape[:-1], -1))
                nnx.update(model, nnx.from_flat_state({path: variable}))
    return model


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
