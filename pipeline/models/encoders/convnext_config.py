"""Sizes and choices of a ConvNeXt, read from a transformers config.

Owns the config. Loads no framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.models.encoders.config_fields import ConfigFields

ARCHITECTURES = ("ConvNextModel", "ConvNextForImageClassification")
INNER_NORM_EPS = 1e-6
"""Of every norm but the last: transformers has it in its code; `layer_norm_eps` of the config is that of the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvnextConfig:
    """Names are those of transformers where it has one."""

    classifies: bool
    num_channels: int
    patch_size: tuple[int, int]
    hidden_sizes: tuple[int, ...]
    depths: tuple[int, ...]
    hidden_act: str
    layer_norm_eps: float
    has_layer_scale: bool
    num_labels: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "ConvnextConfig":
        """Read a transformers config; an absent optional key has the default of transformers.

        Raises:
            ParameterError: it asks for something the module does not compute; all complaints at once.
        """
        fields = ConfigFields(config)
        architecture = fields.architecture(ARCHITECTURES)
        sizes, depths = fields.sizes("hidden_sizes", (96, 192, 384, 768)), fields.sizes("depths", (3, 3, 9, 3))
        stages = fields.size("num_stages", 4)
        fields.require(
            len(sizes) >= stages and len(depths) == stages,
            f"num_stages is {stages}, hidden_sizes has {len(sizes)} and depths {len(depths)}; they must agree",
        )
        parsed = cls(
            classifies=architecture == "ConvNextForImageClassification",
            num_channels=fields.size("num_channels", 3),
            patch_size=fields.pair("patch_size", 4),
            hidden_sizes=sizes[:stages],
            depths=depths,
            hidden_act=fields.activation("hidden_act", default="gelu"),
            layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
            has_layer_scale=fields.number("layer_scale_init_value", 1e-6) > 0,
            num_labels=fields.num_labels(),
        )
        fields.check()
        return parsed
