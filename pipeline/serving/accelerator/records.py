"""Small records of what was measured on a machine, kept for the next process.

Owns how a record is read and written. Knows nothing of what is in one. The one decision: a record can be made again at
any time, so a damaged one counts as none, and a new one is put in place whole.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_record(path: Path | None) -> dict[str, Any]:
    """The record; empty where there is none or it is damaged."""
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_record(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all, whoever reads meanwhile; its directory is made where it is absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, sort_keys=True)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
