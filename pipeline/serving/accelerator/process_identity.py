"""What makes two processes interchangeable.

Owns the identity of the code that a replica runs. Loads nothing. The one decision: a process that runs other code is
replaced and never reconfigured, so what answers is always what the deploying side has on disk.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
_SUFFIXES = (".py", ".cc", ".h")
_PARTS = ("serving", "models", "cluster/ledger.py", "spec/gate.py", "settings.py", "errors.py")


def process_identity(*, cpus: float, gpus: float, environment: Mapping[str, str]) -> str:
    """16 hexadecimal digits over code, resources and environment variables."""
    digest = hashlib.sha256(json.dumps([cpus, gpus, dict(environment)], sort_keys=True).encode())
    for part in _PARTS:
        place = PACKAGE / part
        found = (
            [path for path in place.rglob("*") if path.suffix in (".py", ".cc", ".h")] if place.is_dir() else [place]
        )
        for path in sorted(found):
            digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
