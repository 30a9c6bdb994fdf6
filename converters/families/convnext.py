"""ConvNeXt checkpoints as transformers writes them.

Owns the rule table of the family and its layout facts. Knows nothing of files.
"""

from collections.abc import Collection, Mapping
from typing import Any

from converters.families.layer_rules import KERNEL_LAYOUTS, conv2d, layer_norm, linear
from converters.families.table import FamilyTable
from converters.rules import Rule
from pipeline.models.encoders.convnext_config import INNER_NORM_EPS, ConvnextConfig

_WHOLE = "convnext."
_STAGE = "stages.{stage}"
_LAYER = _STAGE + ".layers.{layer}"


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: the config asks for what the module does not compute.
    """
    parsed = ConvnextConfig.from_dict(config)
    prefix = _WHOLE if parsed.classifies else ""
    stage, layer = f"{prefix}encoder.{_STAGE}", f"{prefix}encoder.{_LAYER}"
    rules = [
        *conv2d(f"{prefix}embeddings.patch_embeddings", "embeddings.patch"),
        *layer_norm(f"{prefix}embeddings.layernorm", "embeddings.norm"),
        *layer_norm(f"{stage}.downsampling_layer.0", f"{_STAGE}.downsampling.norm"),
        *conv2d(f"{stage}.downsampling_layer.1", f"{_STAGE}.downsampling.convolution"),
        *conv2d(f"{layer}.dwconv", f"{_LAYER}.depthwise"),
        *layer_norm(f"{layer}.layernorm", f"{_LAYER}.norm"),
        *linear(f"{layer}.pwconv1", f"{_LAYER}.pointwise1"),
        *linear(f"{layer}.pwconv2", f"{_LAYER}.pointwise2"),
        *layer_norm(f"{prefix}layernorm", "norm"),
    ]
    if parsed.has_layer_scale:
        rules.append(Rule.one(f"{layer}.layer_scale_parameter", f"{_LAYER}.layer_scale"))
    if parsed.classifies:
        rules += linear("classifier", "classifier")
    return FamilyTable(
        family="convnext",
        facts={
            "activation": parsed.hidden_act,
            "depths": list(parsed.depths),
            "hidden_sizes": list(parsed.hidden_sizes),
            "kernel_layout": KERNEL_LAYOUTS["linear"],
            "kernel_layout_conv": KERNEL_LAYOUTS["conv2d"],
            "layer_scale": parsed.has_layer_scale,
            "norm": "layer, over channels",
            "norm_eps": parsed.layer_norm_eps,
            "norm_eps_inner": INNER_NORM_EPS,
            "num_labels": parsed.num_labels if parsed.classifies else 0,
            "patch_size": list(parsed.patch_size),
        },
        rules=tuple(rules),
        prefixes=(_WHOLE, ""),
        blocks=(
            (f"{prefix}embeddings", "embeddings"),
            (f"{prefix}encoder.{_LAYER}", _LAYER),
            (f"{prefix}layernorm", "norm"),
        ),
    )
