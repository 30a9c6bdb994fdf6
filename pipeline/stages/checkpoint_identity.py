"""What `import.checkpoint` reads from outside, as digests.

Owns the identity of a checkpoint that no stage made. Loads nothing heavy, for the planner asks on every `plan`. The one
decision: local files are identified by their content (about 1 GB/s), remote ones by what their store says of them.
"""

import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.artifacts.manifest import sha256_of
from pipeline.data.sources import REMOTE_BACKEND, SourceFile, is_remote
from pipeline.errors import ParameterError
from pipeline.stages.parameters import ImportCheckpointParameters


def digests(parameters: ImportCheckpointParameters, project_root: Path) -> Mapping[str, str]:
    """Digest of the checkpoint's files as they are now, under the key `source`.

    Raises:
        ParameterError: there are no such files.
    """
    return {"source": digest_of(parameters.source, project_root)}


def digest_of(source: str, project_root: Path) -> str:
    """Digest of a checkpoint's files as they are now.

    Raises:
        ParameterError: there are no such files.
    """
    if is_remote(source):
        remote: str = importlib.import_module(REMOTE_BACKEND).digest(source)
        return remote
    hasher = hashlib.sha256()
    for file in checkpoint_files(source, project_root):
        hasher.update(f"{file.name}\0{sha256_of(file.path)}\0".encode())
    return f"sha256:{hasher.hexdigest()}"


def local_place(source: str, project_root: Path) -> str:
    """The path of a local checkpoint, whatever the working directory; a URL as it is."""
    if is_remote(source):
        return source
    plain = urlsplit(source).path if source.startswith("file://") else source
    return str(project_root / Path(plain).expanduser())


def checkpoint_files(source: str, project_root: Path) -> list[SourceFile]:
    """The files of a local checkpoint, ordered by name; hidden ones too, for torch's DCP keeps its index in one.

    Raises:
        ParameterError: nothing is there.
    """
    path = Path(local_place(source, project_root))
    if path.is_file():
        return [SourceFile(name=path.name, path=path)]
    files = [
        SourceFile(name=item.relative_to(path).as_posix(), path=item) for item in path.rglob("*") if item.is_file()
    ]
    if not files:
        raise ParameterError(
            f"source {source!r}: no such file or directory, or an empty one: {path}",
            hint=f"relative paths start from {project_root}",
        )
    return sorted(files, key=lambda file: file.name)
