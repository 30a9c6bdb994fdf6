"""How requests are shared between a champion and a challenger.

Owns the value that travels to the process that serves the champion. Loads no framework. The one decision: which arm
gets a request is a pure function of this value and the request's key, so every replica and every retry decides alike.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from pipeline.errors import ParameterError

Mode = Literal["canary", "shadow"]
_PARTS = 2**64


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficSettings:
    """One trial."""

    mode: Mode
    """`canary`: the challenger answers its share. `shadow`: it gets a copy, and the champion answers."""
    trial_id: str
    """Unique for each trial; what was counted for another one is forgotten."""
    model: str
    """The name that requests ask for."""
    challenger_url: str
    """Without `/v1`."""
    percent: float
    """Of the requests, 0 to 100."""
    session_header: str = "x-session-id"
    """Requests with the same value of it go to the same arm."""
    first_byte_seconds: float = 10.0
    """How long the challenger may take before the champion answers in its place (canary) or the copy is given up."""
    queued_copies: int = 64
    """Copies that wait for the challenger; more are dropped and counted."""
    concurrent_copies: int = 4
    lease_seconds: float = 30.0
    """The trial ends by itself where whoever judges it does not ask for so long: he may have been killed."""

    def is_chosen(self, key: str) -> bool:
        """True where the request with this key belongs to the challenger; raising `percent` only adds keys."""
        digest = hashlib.sha256(f"{self.trial_id}/{key}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / _PARTS < self.percent / 100.0

    def as_json(self) -> dict[str, Any]:
        """What `read_traffic` reads again."""
        return asdict(self)


def read_traffic(given: Mapping[str, Any]) -> TrafficSettings | None:
    """The value behind the configuration's `traffic`; None where it is empty: the champion gets everything.

    Raises:
        ParameterError: it is no such value.
    """
    if not given:
        return None
    known = {item.name for item in fields(TrafficSettings)}
    unknown = sorted(set(given) - known)
    try:
        if unknown:
            raise TypeError(f"unknown: {', '.join(unknown)}")
        return TrafficSettings(**given)
    except TypeError as error:
        raise ParameterError(
            f"traffic: cannot be read: {error}; it has {', '.join(sorted(known))}",
            hint="it was written by another version of this package; deploy the model again",
        ) from error
