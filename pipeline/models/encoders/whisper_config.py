"""Sizes and choices of a Whisper, read from a transformers config.

Owns the config. Loads no framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.models.encoders.config_fields import ConfigFields

ARCHITECTURES = ("WhisperForConditionalGeneration",)
LAYER_NORM_EPS = 1e-5
"""The config has none: the layers have torch's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhisperConfig:
    """Names are those of transformers where it has one."""

    vocab_size: int
    num_mel_bins: int
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_layers: int
    decoder_attention_heads: int
    decoder_ffn_dim: int
    activation_function: str
    max_source_positions: int
    max_target_positions: int
    tie_word_embeddings: bool
    decoder_start_token_id: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "WhisperConfig":
        """Read a transformers config; an absent optional key has the default of transformers.

        Raises:
            ParameterError: it asks for something the module does not compute; all complaints at once.
        """
        fields = ConfigFields(config)
        fields.architecture(ARCHITECTURES)
        size = fields.size("d_model", 384)
        parsed = cls(
            vocab_size=fields.size("vocab_size", 51865),
            num_mel_bins=fields.size("num_mel_bins", 80),
            d_model=size,
            encoder_layers=fields.size("encoder_layers", 4),
            encoder_attention_heads=fields.heads("encoder_attention_heads", 6, of="d_model", size=size),
            encoder_ffn_dim=fields.size("encoder_ffn_dim", 1536),
            decoder_layers=fields.size("decoder_layers", 4),
            decoder_attention_heads=fields.heads("decoder_attention_heads", 6, of="d_model", size=size),
            decoder_ffn_dim=fields.size("decoder_ffn_dim", 1536),
            activation_function=fields.activation("activation_function", default="gelu"),
            max_source_positions=fields.size("max_source_positions", 1500),
            max_target_positions=fields.size("max_target_positions", 448),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
            decoder_start_token_id=fields.token("decoder_start_token_id", 50257),
        )
        fields.check()
        return parsed

    @property
    def num_frames(self) -> int:
        """Frames of sound that the encoder takes; its second convolution halves them."""
        return 2 * self.max_source_positions
