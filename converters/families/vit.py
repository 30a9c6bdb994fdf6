"""ViT checkpoints as transformers writes them.

Owns the rule table of the family and its layout facts. Knows nothing of files. The one decision: a checkpoint on disk
has the names of transformers 4, and a training checkpoint those of the module of transformers 5; the names in the file
decide.
"""

from collections.abc import Collection, Mapping
from typing import Any

from converters.families.layer_rules import KERNEL_LAYOUTS, conv2d, layer_norm, linear
from converters.families.table import FamilyTable
from converters.rules import Rule
from pipeline.models.encoders.vit_config import VitConfig

_WHOLE = "vit."
_OURS, _MODULE = "layers.{layer}", "layers.{layer}"
_ON_DISK = {
    "layer": "encoder.layer.{layer}",
    "q_proj": "attention.attention.query",
    "k_proj": "attention.attention.key",
    "v_proj": "attention.attention.value",
    "o_proj": "attention.output.dense",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
}
_IN_MODULE = {
    "layer": _MODULE,
    "q_proj": "attention.q_proj",
    "k_proj": "attention.k_proj",
    "v_proj": "attention.v_proj",
    "o_proj": "attention.o_proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
_MODULE_MARK = ".mlp.fc1."


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: the config asks for what the module does not compute.
    """
    parsed = VitConfig.from_dict(config)
    is_module = any(_MODULE_MARK in name for name in names)
    prefix = _WHOLE if parsed.classifies else ""
    embeddings, pooler = f"{prefix}embeddings", f"{prefix}pooler.dense"
    rules = [
        Rule.one(f"{embeddings}.cls_token", "embeddings.cls_token"),
        Rule.one(f"{embeddings}.position_embeddings", "embeddings.positions"),
        *conv2d(f"{embeddings}.patch_embeddings.projection", "embeddings.patch"),
        *_layer_rules(prefix, names=_IN_MODULE if is_module else _ON_DISK, qkv_bias=parsed.qkv_bias),
        *layer_norm(f"{prefix}layernorm", "norm"),
        *(linear("classifier", "classifier") if parsed.classifies else ()),
        *(linear(pooler, "pooler") if parsed.has_pooler else ()),
    ]
    blocks = [("embeddings", "embeddings"), (_MODULE, _OURS), ("layernorm", "norm")]
    blocks += [("pooler", "pooler")] if parsed.has_pooler else []
    return FamilyTable(
        family="vit",
        facts=_facts(parsed, naming="module" if is_module else "disk"),
        rules=tuple(rules),
        hints={
            "pooler.{part:word}": "if the model was saved without its pooler, write add_pooling_layer: false into "
            "config.json"
        },
        prefixes=(_WHOLE, ""),
        carried=(f"{embeddings}.mask_token", *(() if parsed.has_pooler else (f"{pooler}.{{part:word}}",))),
        blocks=tuple((prefix + theirs, ours) for theirs, ours in blocks),
    )


def _layer_rules(prefix: str, *, names: Mapping[str, str], qkv_bias: bool) -> list[Rule]:
    layer = prefix + names["layer"]
    rules = []
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        has_bias = qkv_bias or name == "o_proj"
        rules += linear(f"{layer}.{names[name]}", f"{_OURS}.attention.{name}", has_bias=has_bias)
    for name in ("fc1", "fc2"):
        rules += linear(f"{layer}.{names[name]}", f"{_OURS}.mlp.{name}")
    rules += layer_norm(f"{layer}.layernorm_before", f"{_OURS}.attention_norm")
    return rules + layer_norm(f"{layer}.layernorm_after", f"{_OURS}.mlp_norm")


def _facts(config: VitConfig, *, naming: str) -> dict[str, Any]:
    return {
        "activation": config.hidden_act,
        "add_pooling_layer": config.has_pooler,
        "attention_scale": "head_dim ** -0.5",
        "image_size": list(config.image_size),
        "kernel_layout": KERNEL_LAYOUTS["linear"],
        "kernel_layout_conv": KERNEL_LAYOUTS["conv2d"],
        "names": naming,
        "norm": "layer",
        "norm_eps": config.layer_norm_eps,
        "norm_places": "before",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_labels": config.num_labels if config.classifies else 0,
        "patch_size": list(config.patch_size),
        "pooler_activation": config.pooler_act if config.has_pooler else None,
        "positions": "learned",
        "qkv_bias": config.qkv_bias,
    }
