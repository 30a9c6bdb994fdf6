"""Sizes and choices of a ViT, read from a transformers config.

Owns the config. Loads no framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.models.encoders.config_fields import POOLER_KEY, ConfigFields

ARCHITECTURES = ("ViTModel", "ViTForImageClassification")


@dataclass(frozen=True, kw_only=True, slots=True)
class VitConfig:
    """Names are those of transformers where it has one."""

    classifies: bool
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    layer_norm_eps: float
    image_size: tuple[int, int]
    """Height and width."""
    patch_size: tuple[int, int]
    num_channels: int
    qkv_bias: bool
    has_pooler: bool
    pooler_output_size: int
    pooler_act: str
    num_labels: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "VitConfig":
        """Read a transformers config; an absent optional key has the default of transformers.

        Raises:
            ParameterError: it asks for something the module does not compute; all complaints at once.
        """
        fields = ConfigFields(config)
        classifies = fields.architecture(ARCHITECTURES) == "ViTForImageClassification"
        size = fields.size("hidden_size", 768)
        image, patch = fields.pair("image_size", 224), fields.pair("patch_size", 16)
        fields.require(all(i >= p for i, p in zip(image, patch, strict=True)), f"patch_size {patch} exceeds {image}")
        parsed = cls(
            classifies=classifies,
            hidden_size=size,
            num_hidden_layers=fields.size("num_hidden_layers", 12),
            num_attention_heads=fields.heads("num_attention_heads", 12, of="hidden_size", size=size),
            intermediate_size=fields.size("intermediate_size", 3072),
            hidden_act=fields.activation("hidden_act", default="gelu"),
            layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
            image_size=image,
            patch_size=patch,
            num_channels=fields.size("num_channels", 3),
            qkv_bias=fields.flag("qkv_bias", default=True),
            has_pooler=not classifies and fields.flag(POOLER_KEY, default=True),
            pooler_output_size=fields.size("pooler_output_size", size),
            pooler_act=fields.activation("pooler_act", default="tanh"),
            num_labels=fields.num_labels(),
        )
        fields.check()
        return parsed

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size[0] // self.patch_size[0]) * (self.image_size[1] // self.patch_size[1])
