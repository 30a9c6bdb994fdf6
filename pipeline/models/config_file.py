"""`config.json` of a model directory, as transformers writes it.

Owns its name and its reading. Loads no framework.
"""

from pathlib import Path
from typing import Any

from pipeline.errors import ArtifactError
from pipeline.models.json_file import read_json

CONFIG_FILE = "config.json"
_HINT = "convert the model again, or restore the file that transformers wrote"


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a model directory.

    Raises:
        ArtifactError: it is missing or not a JSON object.
    """
    path = directory / CONFIG_FILE
    try:
        config = read_json(path)
    except ValueError as error:
        raise ArtifactError(f"{path}: cannot be read: {error}", hint=_HINT) from error
    if not isinstance(config, dict):
        raise ArtifactError(f"{path}: must be a JSON object, found {type(config).__name__}", hint=_HINT)
    return config
