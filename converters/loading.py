"""A Flax module from whatever holds its weights.

Owns the choice between loading a Flax model directory and converting a checkpoint on the fly. Knows nothing of formats.
The one decision: a checkpoint is converted into a temporary directory and loaded from there, so there is one way into a
module, and what it checks is always checked.
"""

import tempfile
from pathlib import Path

from flax import nnx

from converters.conversion import convert
from pipeline.models.checkpoint import PARAMETERS_DIRECTORY, load_model


def load(path: str | Path, *, dtype: str | None = None) -> nnx.Module:
    """The Flax module of a Flax model directory, or of any checkpoint that `convert` takes.

    Args:
        path: a directory with `params/`, or a checkpoint.
        dtype: `float32` or `bfloat16` to cast every float leaf; None keeps what is stored.

    Raises:
        ArtifactError: the directory is damaged or does not fit its config.
        CheckpointError: the checkpoint is missing, truncated or altered.
        ConversionError: the checkpoint does not fit the model.
        ParameterError: the config asks for something the Flax model does not have.
    """
    if (Path(path) / PARAMETERS_DIRECTORY).is_dir():
        return load_model(Path(path), dtype=dtype)
    with tempfile.TemporaryDirectory(prefix="converted-") as temporary:
        directory = Path(temporary) / "model"
        convert(path, to=directory)
        return load_model(directory, dtype=dtype)
