"""Which model families exist.

Owns the table from a config's `model_type` to its config and module classes. Knows nothing of weights. The one
decision: families are rows; conversion, evaluation and serving find a model only through this table, and through
`describe`, which also knows the models that were traced.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import ParameterError, nearest_name
from pipeline.models.config_file import read_config
from pipeline.models.decoder_families import DECODERS
from pipeline.models.description import ModelDescription
from pipeline.models.encoder_families import ENCODERS
from pipeline.models.family import Family, FamilyModel
from pipeline.models.traced.description import TracedModel
from pipeline.models.traced.program_file import PROGRAM_FILE

FAMILIES: Mapping[str, Family] = {**DECODERS, **ENCODERS}


def describe(directory: Path) -> ModelDescription:
    """What the model directory describes: a traced program where there is one, a family's config otherwise.

    Raises:
        ArtifactError: its description is missing or malformed.
        ParameterError: the config is of no known family or not supported.
    """
    if (directory / PROGRAM_FILE).is_file():
        return TracedModel.read(directory)
    return describe_config(read_config(directory))


def describe_config(config: Mapping[str, Any]) -> ModelDescription:
    """What a transformers config describes.

    Raises:
        ParameterError: the config is of no known family or not supported.
    """
    family = family_of(config)
    return FamilyModel(family=family, parsed=family.config.from_dict(config))


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a transformers config names by `model_type`.

    Raises:
        ParameterError: there is no such family; the message names the allowed ones and the nearest.
    """
    model_type = str(config.get("model_type", ""))
    family = FAMILIES.get(model_type)
    if family is None:
        guess = nearest_name(model_type, tuple(FAMILIES))
        raise ParameterError(
            f"model config: model_type is {model_type!r}; allowed: {', '.join(FAMILIES)}"
            + (f"; did you mean {guess!r}?" if guess else ""),
            hint="convert the checkpoint by tracing (`via: trace`), or add the family to pipeline/models/",
        )
    return family
