"""Sizes and choices of a CLIP, read from a transformers config.

Owns the config of both towers. Loads no framework. The one decision: how a text is pooled depends on the age of its
config, and is decided here: an `eos_token_id` of 2 marks configs that never named the right token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.models.encoders.config_fields import ConfigFields

ARCHITECTURES = ("CLIPModel",)
LEGACY_EOS_TOKEN_ID = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipTower:
    """One of the two encoders."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str
    layer_norm_eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipText(ClipTower):
    """The encoder of texts."""

    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int

    @property
    def pools_largest_token(self) -> bool:
        """True where the text's vector is that of its largest token id, the end-of-text token of the first CLIPs."""
        return self.eos_token_id == LEGACY_EOS_TOKEN_ID


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipVision(ClipTower):
    """The encoder of images."""

    num_channels: int
    image_size: int
    patch_size: int

    @property
    def num_positions(self) -> int:
        """Patches of an image and one more."""
        return (self.image_size // self.patch_size) ** 2 + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig:
    """Both towers and the space they share."""

    text: ClipText
    vision: ClipVision
    projection_dim: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "ClipConfig":
        """Read a transformers config; an absent optional key has the default of transformers.

        Raises:
            ParameterError: it asks for something the module does not compute; all complaints at once.
        """
        fields = ConfigFields(config)
        fields.architecture(ARCHITECTURES)
        # transformers: a `*_config_dict` of an old file replaces the config beside it.
        text = fields.part("text_config_dict", "text_config")
        vision = fields.part("vision_config_dict", "vision_config")
        parsed = cls(
            text=ClipText(
                **_tower(text, size=512, inner=2048, heads=8),
                vocab_size=text.size("vocab_size", 49408),
                max_position_embeddings=text.size("max_position_embeddings", 77),
                eos_token_id=text.token("eos_token_id", 49407),
            ),
            vision=ClipVision(
                **_tower(vision, size=768, inner=3072, heads=12),
                num_channels=vision.size("num_channels", 3),
                image_size=vision.size("image_size", 224),
                patch_size=vision.size("patch_size", 32),
            ),
            projection_dim=fields.size("projection_dim", 512),
        )
        for name, tower in (("text_config", text), ("vision_config", vision)):
            fields.complaints += [f"{name}.{complaint}" for complaint in tower.complaints]
        fields.check()
        return parsed


def _tower(fields: ConfigFields, *, size: int, inner: int, heads: int) -> dict[str, Any]:
    size = fields.size("hidden_size", size)
    return {
        "hidden_size": size,
        "intermediate_size": fields.size("intermediate_size", inner),
        "num_hidden_layers": fields.size("num_hidden_layers", 12),
        "num_attention_heads": fields.heads("num_attention_heads", heads, of="hidden_size", size=size),
        "hidden_act": fields.activation("hidden_act", default="quick_gelu"),
        "layer_norm_eps": fields.number("layer_norm_eps", 1e-5),
    }
