"""What `data.text` reads from outside, as digests.

Owns the identity of its source and of a tokenizer that no stage made. Loads nothing heavy, for the planner asks on
every `plan`. The one decision: of a model's directory only the files that are read count, so weights that change beside
a tokenizer leave the dataset as it is.
"""

import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path

from pipeline.artifacts.manifest import sha256_of
from pipeline.data import sources
from pipeline.errors import ParameterError
from pipeline.stages.checkpoint_identity import local_place
from pipeline.stages.parameters import DataTextParameters

_READ = ("tokenizer.json", "tokenizer_config.json", "config.json", "special_tokens_map.json", "chat_template.jinja")
_TEMPLATES = "additional_chat_templates"


def digests(parameters: DataTextParameters, project_root: Path) -> Mapping[str, str]:
    """Digests under the keys `source` and, where it is a place and no output of a stage, `tokenizer`.

    Raises:
        ParameterError: the source or the tokenizer does not exist.
    """
    made = dict(sources.digests(parameters, project_root))
    if isinstance(parameters.tokenizer, str):
        made["tokenizer"] = _tokenizer_digest(parameters.tokenizer, project_root)
    return made


def _tokenizer_digest(place: str, project_root: Path) -> str:
    if sources.is_remote(place):
        digest: str = importlib.import_module(sources.REMOTE_BACKEND).digest(place)
        return digest
    path = Path(local_place(place, project_root))
    directory, first = (path, _READ[0]) if path.is_dir() else (path.parent, path.name)
    hasher = hashlib.sha256()
    try:
        hasher.update(sha256_of(directory / first).encode())
    except OSError as error:
        raise ParameterError(
            f"tokenizer {place!r}: {directory / first} cannot be read ({error.strerror})",
            hint=f"name a tokenizer.json, or a directory that holds one; relative paths start from {project_root}",
        ) from error
    templates = sorted(path.name for path in (directory / _TEMPLATES).glob("*.jinja"))
    for name in (*_READ[1:], *(f"{_TEMPLATES}/{name}" for name in templates)):
        if (directory / name).is_file():
            hasher.update(f"{name}\0{sha256_of(directory / name)}\0".encode())
    return f"sha256:{hasher.hexdigest()}"
