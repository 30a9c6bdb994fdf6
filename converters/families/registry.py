"""Which families have a rule table.

Owns the map from a config's `model_type` to the function that makes its table. Knows nothing of tables. The one
decision: a checkpoint's family is what its own config names, never a guess from tensor names; names decide only what no
config says, such as a prefix or whether experts lie apart or stacked.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from converters.families import (
    bert,
    clip,
    convnext,
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    mixtures,
    phi3,
    resnet,
    t5,
    vit,
    whisper,
)
from converters.families.table import FamilyTable
from pipeline.errors import ConversionError, nearest_name

TableMaker = Callable[[Mapping[str, Any], Collection[str]], FamilyTable]
"""Of a transformers config and the names of the checkpoint's tensors; without names, what `save_pretrained` writes."""

TABLES: Mapping[str, TableMaker] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2"), llama.table),
    **dict.fromkeys(("mixtral", "qwen3_moe"), mixtures.table),
    "gemma3": gemma3.table,
    "phi3": phi3.table,
    "gpt2": gpt2.table,
    "gpt_neox": gpt_neox.table,
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), bert.table),
    "t5": t5.table,
    "whisper": whisper.table,
    "vit": vit.table,
    "clip": clip.table,
    "resnet": resnet.table,
    "convnext": convnext.table,
}


def table_for(config: Mapping[str, Any], *, names: Collection[str] = ()) -> FamilyTable:
    """The table for the checkpoint that `config` describes.

    Args:
        config: of transformers.
        names: the checkpoint's tensors without wrapper prefixes; for the way back, those it had. They decide what of
            the file's layout the config does not tell.

    Raises:
        ConversionError: no family has this `model_type`, or its config does not fit; names the allowed and the nearest.
        ParameterError: a size is missing or does not divide, or the activation or rope scaling is unknown.
    """
    model_type = str(config.get("model_type", ""))
    make = TABLES.get(model_type)
    if make is None:
        guess = nearest_name(model_type, tuple(TABLES))
        raise ConversionError(
            f"config.json: model_type {model_type!r} has no conversion rules; allowed: {', '.join(TABLES)}"
            + (f"; did you mean {guess!r}?" if guess else ""),
            hint="add a table under converters/families/ and a model under pipeline/models/",
        )
    return make(config, names)
