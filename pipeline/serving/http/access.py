"""Who may ask a model, how much, and how large.

Owns the limits of one model as one value. Knows nothing of HTTP. The one decision: clients are told apart by their
keys; without keys all clients are one, because behind a proxy nothing else is certain.
"""

import time
from dataclasses import dataclass, field

from pipeline.serving.http.api_keys import is_among
from pipeline.serving.http.rate_limits import Admission, RateLimits, Rates
from pipeline.serving.replica_settings import ReplicaSettings

MAX_REQUEST_BYTES = 4 * 2**20
"""Of a body, where the deployment does not say."""


@dataclass(kw_only=True)
class Access:
    """Of one model; may change while it serves."""

    key_digests: tuple[str, ...] = ()
    """Without any, everybody may ask."""
    limits: RateLimits = field(default_factory=lambda: RateLimits(Rates(), clock=time.monotonic))
    usual_request_bytes: int = MAX_REQUEST_BYTES
    """Of the endpoint, where the deployment does not say."""
    max_request_bytes: int = 0
    """0 is the usual."""

    def __post_init__(self) -> None:
        self.max_request_bytes = self.max_request_bytes or self.usual_request_bytes

    def apply(self, settings: ReplicaSettings) -> None:
        """Become what the settings of a replica say; what clients took stays taken where the rates are the same."""
        own = (settings.smoke_key_digest,) if settings.smoke_key_digest else ()
        self.key_digests = (*settings.api_key_digests, *own) if settings.api_key_digests else ()
        rates = Rates(requests_per_minute=settings.requests_per_minute, tokens_per_minute=settings.tokens_per_minute)
        if rates != self.limits.rates:
            self.limits = RateLimits(rates, clock=time.monotonic)
        self.max_request_bytes = settings.max_request_bytes or self.usual_request_bytes

    @property
    def is_open(self) -> bool:
        """True where no key is needed."""
        return not self.key_digests

    def allows(self, digest: str | None) -> bool:
        """True where the holder of this key may ask."""
        return self.is_open or (digest is not None and is_among(digest, self.key_digests))


class Meter:
    """Counts what one client takes of one model's limits."""

    def __init__(self, limits: RateLimits, *, client: str) -> None:
        self._limits = limits
        self._client = client
        self.admission: Admission | None = None
        """The last one."""

    def admit(self, *, num_tokens: int) -> Admission:
        """Take a request, and the tokens it may cost at most.

        Raises:
            RateLimited: there is not enough left.
        """
        self.admission = self._limits.admit(self._client, num_tokens=num_tokens)
        return self.admission


def access_of(settings: ReplicaSettings, *, max_request_bytes: int = MAX_REQUEST_BYTES) -> Access:
    """What the settings of a replica say; `max_request_bytes` where they do not."""
    access = Access(usual_request_bytes=max_request_bytes)
    access.apply(settings)
    return access
