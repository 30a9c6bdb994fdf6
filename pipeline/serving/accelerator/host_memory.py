"""How much memory this process may still take of its machine.

Owns that question. Loads no framework. The one decision: a container's limit counts as well as the machine's, because
the system kills what exceeds either.
"""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_bytes(*, cgroup: Path = CGROUP) -> int:
    """The smaller of what the machine has available and what the container's limit leaves."""
    available = int(psutil.virtual_memory().available)
    left = _left_in_container(cgroup)
    return available if left is None else min(available, left)


def _left_in_container(cgroup: Path) -> int | None:
    """The limit less what is used and cannot be dropped; None without a limit (or without cgroups of version 2)."""
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        facts = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(facts.get("inactive_file", 0)))
