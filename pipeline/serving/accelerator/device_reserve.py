"""How much of a device a process takes beside its allocator, measured once for each image.

Owns the file that remembers it. Loads no framework. The one decision: it is measured while the only process that
starts on the device is this one, as what the device gained less what the allocator holds, and a figure that cannot be
right is dropped.
"""

from pathlib import Path

from pipeline.cluster.ledger import Reserve
from pipeline.serving.accelerator.records import read_record, write_record

FILE = "device-reserve.json"
PLAUSIBLE_BYTES = (128 * 2**20, 6 * 2**30)
"""Contexts take 0.3 to 1 GiB, libraries with workspaces as much again."""


def known_reserve(directory: Path | None, *, image: str) -> Reserve:
    """What was measured of this image, else the default."""
    num_bytes = read_record(None if directory is None else directory / FILE).get(image) if image else None
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
    known = read_record(directory / FILE)
    known[image] = max(num_bytes, known.get(image, 0))
    write_record(directory / FILE, known)
    return Reserve(num_bytes=known[image], source="measured here")
