"""Sizes and choices of a ResNet, read from a transformers config.

Owns the config. Loads no framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.models.encoders.config_fields import ConfigFields

ARCHITECTURES = ("ResNetModel", "ResNetForImageClassification")
BOTTLENECK_REDUCTION = 4
BATCH_NORM_EPS, TORCH_MOMENTUM = 1e-5, 0.1
"""The config has neither: the norms have torch's defaults. Flax's momentum is one minus torch's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResnetConfig:
    """Names are those of transformers where it has one."""

    classifies: bool
    num_channels: int
    embedding_size: int
    hidden_sizes: tuple[int, ...]
    depths: tuple[int, ...]
    is_bottleneck: bool
    hidden_act: str
    downsample_in_first_stage: bool
    downsample_in_bottleneck: bool
    num_labels: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "ResnetConfig":
        """Read a transformers config; an absent optional key has the default of transformers.

        Raises:
            ParameterError: it asks for something the module does not compute; all complaints at once.
        """
        fields = ConfigFields(config)
        architecture = fields.architecture(ARCHITECTURES)
        sizes, depths = fields.sizes("hidden_sizes", (256, 512, 1024, 2048)), fields.sizes("depths", (3, 4, 6, 3))
        fields.require(
            len(sizes) == len(depths), f"hidden_sizes has {len(sizes)} stages and depths {len(depths)}; they must agree"
        )
        is_bottleneck = fields.choice("layer_type", ("basic", "bottleneck"), default="bottleneck") == "bottleneck"
        fields.require(
            not is_bottleneck or min(sizes) >= BOTTLENECK_REDUCTION,
            f"hidden_sizes {sizes}: a bottleneck divides by {BOTTLENECK_REDUCTION}",
        )
        parsed = cls(
            classifies=architecture == "ResNetForImageClassification",
            num_channels=fields.size("num_channels", 3),
            embedding_size=fields.size("embedding_size", 64),
            hidden_sizes=sizes,
            depths=depths,
            is_bottleneck=is_bottleneck,
            hidden_act=fields.activation("hidden_act", default="relu"),
            downsample_in_first_stage=fields.flag("downsample_in_first_stage", default=False),
            downsample_in_bottleneck=fields.flag("downsample_in_bottleneck", default=False),
            num_labels=fields.num_labels(),
        )
        fields.check()
        return parsed
