"""Sizes and choices of a decoder-only language model.

Owns the config that every decoder family is brought to, and the sizes that follow from it. Loads no framework, so that
a process without jax can judge a model; knows no family. The one decision: a family is nothing but a value of this
config, so one module serves them all and what two families share is computed by the same line.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.models.decoders.rotary_scaling import Rotary

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """How activations are normalised."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float
    offset: float = 0.0
    """Added to the stored scale: 1 for Gemma, which stores zero for a gain of one."""
    scales_in_float32: bool = False
    """True where the scale is applied before the cast back to the model's dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """What one layer does unlike its neighbours."""

    rotary: Rotary | None
    """None where positions are learned."""
    scale: float
    """Attention scores are multiplied by it."""
    window: int | None = None
    """A token sees itself and the `window - 1` tokens before it; None sees all of them."""
    has_experts: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A feed-forward network that is one of many for each token."""

    num: int
    num_per_token: int
    intermediate_size: int
    normalizes: bool
    """True where the chosen experts' probabilities are divided by their sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and choices of a decoder; names are those of transformers where it has one."""

    family: str
    """`model_type`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[Layer, ...]
    norm: Norm
    norm_places: Literal["before", "after", "around"] = "before"
    """Of the norms of a layer, seen from attention and feed-forward."""
    is_parallel: bool = False
    """True where attention and feed-forward both read the layer's input."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """Norm of queries and keys: over each head, or over all heads together."""
    learns_positions: bool = False
    activation: Activation = "silu"
    is_gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    """Rounded to the dtype of the embedding before it multiplies."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    rotates_in_float32: bool = False
    experts: Experts | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def longest_context(self) -> int:
        """Up to how many positions the model can be served with a key-value cache."""
        bounds = [layer.rotary.longest_cache for layer in self.layers if layer.rotary is not None]
        return min([self.max_position_embeddings, *bounds])

    @property
    def num_parameters(self) -> int:
        """Numbers in all leaves together."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        if self.learns_positions:
            tables += self.max_position_embeddings * self.hidden_size
        layers = sum(self._layer_numbers(layer) for layer in self.layers)
        return tables + layers + self._norm_numbers(self.hidden_size)

    def num_cache_numbers(self, *, slots: int, positions: int) -> int:
        """Numbers in the key-value cache of so many slots."""
        return slots * positions * 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def _norm_numbers(self, size: int) -> int:
        return size if self.norm.kind == "rms" else 2 * size

    def _layer_numbers(self, layer: Layer) -> int:
        wide, narrow = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = 2 * self.hidden_size * (wide + narrow)
        attention += (wide + 2 * narrow) * self.qkv_bias + self.hidden_size * self.output_bias
        attention += {
            "none": 0,
            "head": 2 * self._norm_numbers(self.head_dim),
            "full": self._norm_numbers(wide) + self._norm_numbers(narrow),
        }[self.qk_norm]
        inner = (2 if self.is_gated else 1) * self.hidden_size
        if layer.has_experts and self.experts is not None:
            width = self.experts.intermediate_size
            mlp = self.experts.num * (width * (inner + self.hidden_size) + self.hidden_size)
        else:
            mlp = self.intermediate_size * (inner + self.hidden_size)
            mlp += ((2 if self.is_gated else 1) * self.intermediate_size + self.hidden_size) * self.mlp_bias
        norms = (4 if self.norm_places == "around" else 2) * self._norm_numbers(self.hidden_size)
        return attention + mlp + norms
