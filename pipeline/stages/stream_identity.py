"""What `data.stream` reads from outside, as a digest.

Owns the identity of a dataset that no stage of the flow made, and the reading of its small files. Loads nothing heavy,
for the planner asks on every `plan`. The one decision: `manifest.json` holds the sha256 of every other file, so its own
digest is that of the dataset.
"""

import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path

from pipeline.data.manifest import MANIFEST_NAME
from pipeline.data.sources import REMOTE_BACKEND, is_remote
from pipeline.errors import ParameterError
from pipeline.stages.checkpoint_identity import local_place
from pipeline.stages.parameters import DataStreamParameters


def digests(parameters: DataStreamParameters, project_root: Path) -> Mapping[str, str]:
    """Digest of the dataset as it is now and of where it is, for that is in the output, under the key `source`.

    Raises:
        ParameterError: it cannot be read.
    """
    place = local_place(parameters.source, project_root)
    identity = place.encode() + b"\0" + read_small(place, MANIFEST_NAME)
    return {"source": f"sha256:{hashlib.sha256(identity).hexdigest()}"}


def read_small(place: str, name: str) -> bytes:
    """A file of the dataset at `place`, a directory or a URL.

    Raises:
        ParameterError: it cannot be read.
    """
    if is_remote(place):
        content: bytes = importlib.import_module(REMOTE_BACKEND).read_file(f"{place.rstrip('/')}/{name}")
        return content
    try:
        return (Path(place) / name).read_bytes()
    except OSError as error:
        raise ParameterError(
            f"dataset {place}: {name} cannot be read ({error.strerror})",
            hint="name the directory or URL that holds what `data.text` wrote",
        ) from error
