"""CLIP checkpoints as transformers writes them.

Owns the rule table of the family and its layout facts. Knows nothing of files.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from converters.families.layer_rules import KERNEL_LAYOUTS, conv2d, embedding, layer_norm, linear
from converters.families.table import FamilyTable
from converters.rules import Rule
from pipeline.models.encoders.clip_config import ClipConfig

_TEXT, _VISION = "text_model", "vision_model"
_PROJECTIONS = (("q_proj", "q_proj"), ("k_proj", "k_proj"), ("v_proj", "v_proj"), ("out_proj", "o_proj"))


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: the config asks for what the module does not compute.
    """
    parsed = ClipConfig.from_dict(config)
    rules = [
        embedding(f"{_TEXT}.embeddings.token_embedding", "text.token"),
        embedding(f"{_TEXT}.embeddings.position_embedding", "text.position"),
        *_layer_rules(_TEXT, "text"),
        *layer_norm(f"{_TEXT}.final_layer_norm", "text.norm"),
        Rule.one(f"{_VISION}.embeddings.class_embedding", "vision.cls_token"),
        *conv2d(f"{_VISION}.embeddings.patch_embedding", "vision.patch", has_bias=False),
        embedding(f"{_VISION}.embeddings.position_embedding", "vision.position"),
        *layer_norm(f"{_VISION}.pre_layrnorm", "vision.pre_norm"),  # transformers spells it so
        *_layer_rules(_VISION, "vision"),
        *layer_norm(f"{_VISION}.post_layernorm", "vision.post_norm"),
        *linear("text_projection", "text_projection", has_bias=False),
        *linear("visual_projection", "visual_projection", has_bias=False),
        Rule.one("logit_scale", "logit_scale"),
    ]
    return FamilyTable(
        family="clip",
        facts={
            "attention_scale": "head_dim ** -0.5",
            "kernel_layout": KERNEL_LAYOUTS["linear"],
            "kernel_layout_conv": KERNEL_LAYOUTS["conv2d"],
            "norm": "layer",
            "norm_places": "before",
            "projection_dim": parsed.projection_dim,
            "text": asdict(parsed.text),
            "text_pooled_at": "largest token" if parsed.text.pools_largest_token else "end-of-text token",
            "vision": asdict(parsed.vision),
        },
        rules=tuple(rules),
        ignored=(f"{_TEXT}.embeddings.position_ids", f"{_VISION}.embeddings.position_ids"),
        blocks=(
            (f"{_VISION}.pre_layrnorm", "vision.pre_norm"),
            (f"{_VISION}.encoder.layers.{{layer}}", "vision.layers.{layer}"),
            (f"{_VISION}.post_layernorm", "vision.post_norm"),
            (f"{_TEXT}.encoder.layers.{{layer}}", "text.layers.{layer}"),
            (f"{_TEXT}.final_layer_norm", "text.norm"),
        ),
    )


def _layer_rules(theirs: str, ours: str) -> list[Rule]:
    layer, mine = f"{theirs}.encoder.layers.{{layer}}", f"{ours}.layers.{{layer}}"
    rules = []
    for source, target in _PROJECTIONS:
        rules += linear(f"{layer}.self_attn.{source}", f"{mine}.attention.{target}")
    for name in ("fc1", "fc2"):
        rules += linear(f"{layer}.mlp.{name}", f"{mine}.mlp.{name}")
    rules += layer_norm(f"{layer}.layer_norm1", f"{mine}.attention_norm")
    return rules + layer_norm(f"{layer}.layer_norm2", f"{mine}.mlp_norm")
