"""Who has which share of the accelerators, and what a share is worth in bytes.

Owns the arithmetic of sharing. Pure: devices and claims are values, whether they come from a flow that is planned or
from what runs. The one decision: a share is a promise of memory. Promises on one device never exceed it, and a process
that has one gives its allocator the share less what lies outside the allocator, and never more than 95 % of it, so
that the allocators of one device hold at most 95 % of it together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.errors import ParameterError

ALLOCATED_FRACTION = 0.95
"""Of a device, for all allocators together; asking for nearly everything breaks cuBLAS and cuDNN."""
DEFAULT_RESERVE_BYTES = 2**30
"""Of each process, for the context and the libraries; 0.8 to 1.5 GiB are usual. Used until it has been measured."""
MIN_ALLOCATOR_BYTES = 256 * 2**20
"""Less than this serves nothing."""
GRAINS = 10_000
"""Ray counts a resource in ten-thousandths."""
MAX_ARRANGEMENTS = 20_000
"""Tried before a set of claims counts as one that does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Processes of one owner that hold devices."""

    owner: str
    """Of a deployment, its name."""
    share: float
    """Of a device, or a whole number of devices, for each process."""
    processes: int = 1

    def __str__(self) -> str:
        return f"{self.owner!r} {self.share:g}" + (f" x {self.processes}" if self.processes > 1 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """What a process takes of a device beside its allocator."""

    num_bytes: int = DEFAULT_RESERVE_BYTES
    source: str = "the default, not measured here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """What the allocator of one process may take."""

    fraction: float
    """Of each device that the process sees; what `XLA_CLIENT_MEM_FRACTION` is set to."""
    reason: str
    """The arithmetic."""


def why_oversubscribed(
    claims: Iterable[Claim], *, num_devices: int, source: str, running: Iterable[Claim] = ()
) -> str | None:
    """The arithmetic in words where the claims do not fit on the devices beside what runs, else None.

    A part of a device lies on one device; a share of 1 or more takes whole ones. Claims on nothing fit anywhere.

    Args:
        claims: what is asked for.
        num_devices: accelerators.
        source: whose they are, for the message.
        running: what has its devices already.
    """
    asked, there = [one for one in claims if one.share > 0], [one for one in running if one.share > 0]
    if not asked:
        return None
    odd = [one for one in asked if one.share > 1 and one.share != int(one.share)]
    if odd:
        return f"{_listed(odd)}: more than one device is taken in whole devices; use a whole number, or at most 1"
    both = [*there, *asked]
    total = sum(one.share * one.processes for one in both)
    sum_text = f"{_added(there)} run already; {_added(asked)} asked for" if there else _added(asked)
    devices = f"{source} has {num_devices} GPU{'' if num_devices == 1 else 's'}"
    if total > num_devices + 0.5 / GRAINS:
        return f"GPUs are oversubscribed: {sum_text}: {total:g} together; {devices}"
    if not _fits(both, num_devices=num_devices):
        return (
            f"GPUs are oversubscribed: {sum_text}: {total:g} together would fit, but each part must lie on one device, "
            f"and no arrangement of these was found; {devices}"
        )
    return None


def grant_of(share: float, *, total_bytes: int | None, reserve: Reserve) -> Grant:
    """The allocator's fraction for a process with this share of each of its devices.

    Args:
        share: above 1 it counts as 1, for each of the devices is then whole.
        total_bytes: of one device; None where nobody can tell.
        reserve: of one process.

    Raises:
        ParameterError: the share leaves the allocator nothing to work with.
    """
    part = min(share, 1.0)
    if total_bytes is None:
        fraction = _rounded_down(ALLOCATED_FRACTION * part)
        return Grant(
            fraction=fraction, reason=f"{ALLOCATED_FRACTION:g} x {part:g}, for the size of the device is unknown"
        )
    fraction = _rounded_down(min(ALLOCATED_FRACTION * part, part - reserve.num_bytes / total_bytes))
    arithmetic = (
        f"{part:g} x {gib(total_bytes)} = {gib(part * total_bytes)}, less {gib(reserve.num_bytes)} for the context and "
        f"libraries of the process ({reserve.source}), at most {ALLOCATED_FRACTION:g} of the share"
    )
    if fraction * total_bytes < MIN_ALLOCATOR_BYTES:
        least = (reserve.num_bytes + MIN_ALLOCATOR_BYTES) / total_bytes
        raise ParameterError(
            f"resources: gpus: {share:g} leaves {gib(max(0.0, fraction) * total_bytes)} to compute with: {arithmetic}",
            hint=f"ask for at least {least + 0.005:.2f} of this device",
        )
    return Grant(fraction=fraction, reason=f"{arithmetic}: {gib(fraction * total_bytes)}")


def gib(num_bytes: float) -> str:
    """`12.34 GiB`."""
    return f"{num_bytes / 2**30:.2f} GiB"


def _rounded_down(fraction: float) -> float:
    return int(fraction * GRAINS) / GRAINS


def _listed(claims: Sequence[Claim]) -> str:
    return ", ".join(str(one) for one in claims)


def _added(claims: Sequence[Claim]) -> str:
    return " + ".join(str(one) for one in claims)


def _fits(claims: Sequence[Claim], *, num_devices: int) -> bool:
    """Whether whole claims and parts can lie side by side; the largest are laid first."""
    sizes = sorted((_grains(one.share) for one in claims for _ in range(one.processes)), reverse=True)
    whole = sum(size for size in sizes if size >= GRAINS) // GRAINS
    parts = tuple(size for size in sizes if size < GRAINS)
    if whole > num_devices:
        return False
    seen: set[tuple[int, tuple[int, ...]]] = set()
    # Depth first, the first device with room first; devices with the same room are the same.
    pending = [(0, (GRAINS,) * (num_devices - whole))]
    while pending and len(seen) < MAX_ARRANGEMENTS:
        laid, free = state = pending.pop()
        if laid == len(parts):
            return True
        if state in seen:
            continue
        seen.add(state)
        for room in sorted({room for room in free if room >= parts[laid]}, reverse=True):
            left = list(free)
            left[left.index(room)] -= parts[laid]
            pending.append((laid + 1, tuple(sorted(left))))
    return False


def _grains(share: float) -> int:
    return round(share * GRAINS)
