"""ResNet checkpoints as transformers writes them.

Owns the rule table of the family and its layout facts. Knows nothing of files. The one decision: running statistics are
leaves like any other, never found by a guess from their names; the counters beside them are carried.
"""

from collections.abc import Collection, Mapping
from typing import Any

from converters.families.layer_rules import KERNEL_LAYOUTS, batch_norm, conv2d, linear
from converters.families.table import FamilyTable
from converters.rules import Rule
from pipeline.models.encoders.resnet_config import BATCH_NORM_EPS, TORCH_MOMENTUM, ResnetConfig

_WHOLE = "resnet."
_LAYER = "stages.{stage}.layers.{layer}"
_CONVOLUTIONS = (
    ("embedder.embedder", "embedder"),
    (f"encoder.{_LAYER}.layer.{{part}}", f"{_LAYER}.layer.{{part}}"),
    (f"encoder.{_LAYER}.shortcut", f"{_LAYER}.shortcut"),
)
"""Torch path and Flax path of every convolution with its batch norm."""


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: the config asks for what the module does not compute.
    """
    parsed = ResnetConfig.from_dict(config)
    prefix = _WHOLE if parsed.classifies else ""
    rules: list[Rule] = []
    for theirs, ours in _CONVOLUTIONS:
        rules += conv2d(f"{prefix}{theirs}.convolution", f"{ours}.convolution", has_bias=False)
        rules += batch_norm(f"{prefix}{theirs}.normalization", f"{ours}.normalization")
    if parsed.classifies:
        rules += linear("classifier.1", "classifier")
    return FamilyTable(
        family="resnet",
        facts={
            "activation": parsed.hidden_act,
            "depths": list(parsed.depths),
            "downsample_in_bottleneck": parsed.downsample_in_bottleneck,
            "downsample_in_first_stage": parsed.downsample_in_first_stage,
            "hidden_sizes": list(parsed.hidden_sizes),
            "kernel_layout": KERNEL_LAYOUTS["linear"],
            "kernel_layout_conv": KERNEL_LAYOUTS["conv2d"],
            "layer_type": "bottleneck" if parsed.is_bottleneck else "basic",
            "norm": "batch",
            "norm_eps": BATCH_NORM_EPS,
            "norm_momentum": 1.0 - TORCH_MOMENTUM,
            "num_labels": parsed.num_labels if parsed.classifies else 0,
        },
        rules=tuple(rules),
        prefixes=(_WHOLE, ""),
        carried=tuple(f"{prefix}{theirs}.normalization.num_batches_tracked" for theirs, _ in _CONVOLUTIONS),
        blocks=(
            (f"{prefix}embedder.embedder", "embedder"),
            (f"{prefix}encoder.{_LAYER}", _LAYER),
        ),
    )
