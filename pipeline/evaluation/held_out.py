"""Which held-out rows are judged, and whether they are this model's language.

Owns the choice of rows and the checks between a dataset and a model. Knows nothing of frameworks and opens no dataset.
The one decision: rows are spread evenly over the split, so a few of them see many documents and the choice is the same
in every run.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ParameterError


def spread_rows(num_rows: int, *, count: int) -> NDArray[np.int64]:
    """At most `count` distinct row indices, evenly spread over `num_rows`, rising.

    Raises:
        ParameterError: the split has no rows.
    """
    if num_rows < 1:
        raise ParameterError(
            "the validation split has no rows",
            hint="raise validation_fraction or lower sequence_length in the data stage",
        )
    return np.unique(np.linspace(0, num_rows - 1, num=min(count, num_rows)).round().astype(np.int64))


def check_language(
    *, dataset_vocabulary: int, model_vocabulary: int, dataset_tokenizer: Path, model_tokenizer: Path
) -> None:
    """Refuse a dataset whose token ids mean something else to the model.

    A model without a tokenizer is held against the size of the vocabulary alone.

    Raises:
        ParameterError: ids exceed the model's vocabulary, or the two tokenizers have different vocabularies.
    """
    if dataset_vocabulary > model_vocabulary:
        raise ParameterError(
            f"the dataset has token ids up to {dataset_vocabulary - 1}, the model's vocabulary ends at "
            f"{model_vocabulary - 1}",
            hint="evaluate on data that was packed with the model's own tokenizer",
        )
    if model_tokenizer.is_file() and _vocabulary(dataset_tokenizer) != _vocabulary(model_tokenizer):
        raise ParameterError(
            f"the dataset was packed with another tokenizer ({dataset_tokenizer}) than the model's ({model_tokenizer})",
            hint="evaluate on data that was packed with the model's own tokenizer",
        )


def _vocabulary(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError(f"{path}: not a tokenizer file: {type(error).__name__}: {error}") from error
