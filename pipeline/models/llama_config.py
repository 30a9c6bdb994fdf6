"""Sizes and choices of a Llama, read from a transformers config.

Owns the config and the rotary frequencies. Loads no framework, so that a process without jax can judge a model. The one
decision: what the module cannot compute is refused here, when the config is read, so no model ever runs with the wrong
frequencies or activation.

Shape suffixes: F head_dim / 2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.errors import ParameterError, nearest_name

ACTIVATIONS = ("silu", "swish")
DEFAULT_THETA = 10000.0
ROPE_TYPES = ("default", "linear", "llama3")

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryScaling:
    """How frequencies depend on the position; fields other than `theta` matter for the named `kind` alone."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "RotaryScaling":
        """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before).

        Raises:
            ParameterError: the scaling is unknown or lacks a field.
        """
        given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = str(given.get("rope_type", given.get("type", "default")))
        if kind not in ROPE_TYPES:
            guess = nearest_name(kind, ROPE_TYPES)
            raise ParameterError(
                f"model config: rope scaling {kind!r} is not supported; allowed: {', '.join(ROPE_TYPES)}"
                + (f"; did you mean {guess!r}?" if guess else ""),
                hint="convert a checkpoint that was trained with one of these scalings",
            )
        if float(given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
            raise ParameterError("model config: partial_rotary_factor other than 1.0 is not supported")
        theta = given.get("rope_theta", config.get("rope_theta"))
        required = {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }[kind]
        missing = [name for name in required if given.get(name) is None]
        if missing:
            raise ParameterError(f"model config: rope scaling {kind!r} needs {', '.join(missing)}")
        numbers = {name: given[name] for name in required}
        return cls(kind=kind, theta=float(theta if theta is not None else DEFAULT_THETA), **numbers)

    def frequencies(self, head_dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Angle per position, float32 [head_dim / 2].

        Formula: `theta ** (-2i / head_dim)`; linear divides by `factor`; llama3 interpolates between both by wavelength
        (transformers, `modeling_rope_utils._compute_llama3_parameters`).
        """
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        plain_F = (np.float32(1.0) / np.power(np.float32(self.theta), exponent)).astype(np.float32)
        if self.kind == "default":
            return plain_F
        slowed_F = plain_F / np.float32(self.factor)
        if self.kind == "linear":
            return slowed_F.astype(np.float32)
        wavelength_F = 2 * math.pi / plain_F
        smooth_F = (self.original_max_position_embeddings / wavelength_F - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended_F = (1 - smooth_F) * slowed_F + smooth_F * plain_F
        is_low = wavelength_F > self.original_max_position_embeddings / self.low_freq_factor
        is_high = wavelength_F < self.original_max_position_embeddings / self.high_freq_factor
        return np.where(is_low, slowed_F, np.where(is_high, plain_F, blended_F)).astype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """Sizes and choices of a Llama; names are those of transformers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rotary: RotaryScaling = field(default_factory=RotaryScaling)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Read a transformers config; an absent optional key has the default of transformers.

        Raises:
            ParameterError: a size is missing or does not divide, or the activation or rope scaling is unknown; all
                complaints at once.
        """
        missing = [name for name in _REQUIRED if config.get(name) is None]
        if missing:
            raise ParameterError(f"model config: missing {', '.join(missing)}")
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        key_value_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // max(heads, 1))
        activation = config.get("hidden_act", "silu")
        complaints = [f"{name} is {config[name]}, must be at least 1" for name in _REQUIRED if int(config[name]) < 1]
        if activation not in ACTIVATIONS:
            complaints.append(f"hidden_act is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
        if heads % key_value_heads:
            complaints.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {key_value_heads}")
        if head_dim % 2:
            complaints.append(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
        if complaints:
            raise ParameterError("model config: " + "; ".join(complaints))
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            head_dim=head_dim,
            max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            initializer_range=float(config.get("initializer_range", 0.02)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            rotary=RotaryScaling.from_config(config),
        )

    @property
    def num_parameters(self) -> int:
        """Numbers in all leaves together."""
        wide, narrow = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = 2 * self.hidden_size * (wide + narrow)
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.attention_bias:
            attention += wide + 2 * narrow + self.hidden_size
        if self.mlp_bias:
            mlp += 2 * self.intermediate_size + self.hidden_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return tables + self.num_hidden_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size

    def num_cache_numbers(self, *, slots: int, positions: int) -> int:
        """Numbers in the key-value cache of so many slots."""
        return slots * positions * 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim
