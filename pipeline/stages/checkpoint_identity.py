"""What `import.checkpoint` reads from outside, as digests.

Owns the identity of a checkpoint that no stage made. Loads nothing heavy, for the planner asks on every `plan`. The one
decision: local files are identified by their content (about 1 GB/s), remote ones by what their store says of them.
"""

import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path

from pipeline.artifacts.manifest import sha256_of
from pipeline.data.sources import REMOTE_BACKEND, is_remote, local_files
from pipeline.stages.parameters import ImportCheckpointParameters


def digests(parameters: ImportCheckpointParameters, project_root: Path) -> Mapping[str, str]:
    """Digest of the checkpoint's files as they are now, under the key `source`.

    Raises:
        ParameterError: there are no such files.
    """
    if is_remote(parameters.source):
        return {"source": importlib.import_module(REMOTE_BACKEND).digest(parameters.source)}
    hasher = hashlib.sha256()
    for file in local_files(parameters.source, project_root):
        hasher.update(f"{file.name}\0{sha256_of(file.path)}\0".encode())
    return {"source": f"sha256:{hasher.hexdigest()}"}
