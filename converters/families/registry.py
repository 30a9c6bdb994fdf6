"""Which families have a rule table.

Owns the map from a config's `model_type` to the function that makes its table. Knows nothing of tables. The one
decision: a checkpoint's family is what its own config names, never a guess from tensor names.
"""

from collections.abc import Callable, Mapping
from typing import Any

from converters.families import llama
from converters.families.table import FamilyTable
from pipeline.errors import ConversionError, nearest_name

TABLES: Mapping[str, Callable[[Mapping[str, Any]], FamilyTable]] = {"llama": llama.table}


def table_for(config: Mapping[str, Any]) -> FamilyTable:
    """The table for the checkpoint that `config` describes.

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
    return make(config)
