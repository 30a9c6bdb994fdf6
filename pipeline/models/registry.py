"""Which model families exist.

Owns the table from a config's `model_type` to its config and module classes. Knows nothing of checkpoints. The one
decision: families are rows here; conversion, evaluation and serving find a model only through this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from pipeline.errors import ParameterError, nearest_name
from pipeline.models.llama import Llama
from pipeline.models.llama_config import LlamaConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model family: how its config is read and which module it makes."""

    model_type: str
    config: type[LlamaConfig]
    module: type[nnx.Module]


FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (Family(model_type="llama", config=LlamaConfig, module=Llama),)
}


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
            hint="add the family to pipeline/models/registry.py, or convert another model",
        )
    return family
