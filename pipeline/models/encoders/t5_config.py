"""Sizes and choices of a T5, read from a transformers config.

Owns the config. Loads no framework. The one decision: whether the head is the embedding and whether the decoder's
output is scaled before it are two facts. Configs of transformers 4 say both with `tie_word_embeddings`; those of
transformers 5 keep `scale_decoder_outputs` apart and always say that the head is tied.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.models.encoders.config_fields import ACTIVATIONS, ConfigFields

ARCHITECTURES = ("T5ForConditionalGeneration", "T5EncoderModel")
GATED = "gated-"


@dataclass(frozen=True, kw_only=True, slots=True)
class T5Config:
    """Names are those of transformers where it has one."""

    has_decoder: bool
    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    relative_attention_num_buckets: int
    relative_attention_max_distance: int
    layer_norm_epsilon: float
    activation: str
    is_gated: bool
    is_tied: bool
    scale_decoder_outputs: bool
    pad_token_id: int
    decoder_start_token_id: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "T5Config":
        """Read a transformers config; an absent optional key has the default of transformers.

        Raises:
            ParameterError: it asks for something the module does not compute; all complaints at once.
        """
        fields = ConfigFields(config)
        architecture = fields.architecture(ARCHITECTURES)
        projection = str(config.get("feed_forward_proj") or "relu")
        activation = projection.removeprefix(GATED)
        fields.require(
            activation in ACTIVATIONS,
            f"feed_forward_proj is {projection!r}; allowed: {', '.join(ACTIVATIONS)}, each with or without {GATED!r}",
        )
        num_layers, pad = fields.size("num_layers", 6), fields.token("pad_token_id", 0)
        is_tied = fields.flag("tie_word_embeddings", default=True)
        parsed = cls(
            has_decoder=architecture == "T5ForConditionalGeneration",
            vocab_size=fields.size("vocab_size", 32128),
            d_model=fields.size("d_model", 512),
            d_kv=fields.size("d_kv", 64),
            d_ff=fields.size("d_ff", 2048),
            num_layers=num_layers,
            num_decoder_layers=fields.size("num_decoder_layers", num_layers),
            num_heads=fields.size("num_heads", 8),
            relative_attention_num_buckets=fields.size("relative_attention_num_buckets", 32),
            relative_attention_max_distance=fields.size("relative_attention_max_distance", 128),
            layer_norm_epsilon=fields.number("layer_norm_epsilon", 1e-6),
            # transformers: "gated-gelu" was trained with the tanh approximation.
            activation="gelu_new" if projection == "gated-gelu" else activation,
            is_gated=projection.startswith(GATED),
            is_tied=is_tied,
            scale_decoder_outputs=fields.flag("scale_decoder_outputs", default=is_tied),
            pad_token_id=pad,
            decoder_start_token_id=fields.token("decoder_start_token_id", pad),
        )
        fields.check()
        return parsed
