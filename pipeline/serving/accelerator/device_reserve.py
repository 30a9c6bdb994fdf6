"""How much of a device a process takes beside its allocator, measured once for each image.

Owns the file that remembers it. Loads no framework. The one decision: it is measured while the only process that
starts on the device is this one, as what the device gained less what the allocator holds, and a figure that cannot be
right is dropped.
"""

import json
import os
import tempfile
from pathlib import Path

from pipeline.cluster.ledger import Reserve

FILE = "device-reserve.json"
PLAUSIBLE_BYTES = (128 * 2**20, 6 * 2**30)
"""Contexts take 0.3 to 1 GiB, libraries with workspaces as much again."""


def known_reserve(directory: Path | None, *, image: str) -> Reserve:
    """What was measured of this image, else the default."""
    num_bytes = _read(directory).get(image) if image else None
    return Reserve() if num_bytes is None else Reserve(num_bytes=num_bytes, source="measured here")


def remember_reserve(directory: Path, *, image: str, before: int, after: int, allocated: int) -> Reserve | None:
    """Keep the largest of what was measured; None where the figure cannot be right.

    Args:
        directory: of the store's state.
        image: libraries, device and driver.
        before: bytes in use on the device before the process started on it.
        after: the same when it was warm.
        allocated: bytes that its allocator holds.
    """
    num_bytes = after - before - allocated
    if not PLAUSIBLE_BYTES[0] <= num_bytes <= PLAUSIBLE_BYTES[1]:
        return None
    known = _read(directory)
    known[image] = max(num_bytes, known.get(image, 0))
    directory.mkdir(parents=True, exist_ok=True)
    # Replaced whole: another replica may read it at any moment.
    handle, name = tempfile.mkstemp(dir=directory, prefix=FILE)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(known, file, indent=1, sort_keys=True)
    Path(name).replace(directory / FILE)
    return Reserve(num_bytes=known[image], source="measured here")


def _read(directory: Path | None) -> dict[str, int]:
    if directory is None:
        return {}
    try:
        found = json.loads((directory / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(image): int(size) for image, size in found.items()} if isinstance(found, dict) else {}
