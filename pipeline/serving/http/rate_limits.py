"""How much a client may ask in a minute.

Owns the two buckets of a client, one of requests and one of tokens. Pure: the clock is given. The one decision: a
request takes what it may cost at most before it starts, and what it did not use goes back when it ends, so that nobody
can start more than the limit allows.
"""

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SECONDS = 60.0
"""Of the period the limits speak of; a bucket that is empty is full again after it."""
FORGET_AFTER = 10_000
"""Clients that are remembered; beyond them those whose buckets are full go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Limits of each client; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Bucket:
    """A token bucket: holds `limit`, and fills at `limit` a minute."""

    def __init__(self, limit: int, *, now: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at = now

    def level(self, now: float) -> float:
        """What may be taken now; below 0 after more was used than taken."""
        self._level = min(float(self.limit), self._level + (now - self._at) * self.limit / SECONDS)
        self._at = now
        return self._level

    def add(self, amount: float, *, now: float) -> None:
        """Give back, or take where negative."""
        self._level = min(float(self.limit), self.level(now) + amount)

    def seconds_until(self, amount: float, *, now: float) -> float:
        """Until so much may be taken."""
        return max(0.0, (amount - self.level(now)) * SECONDS / self.limit)


class RateLimited(Exception):  # noqa: N818 - an answer, not a fault of this program
    """The client has to wait."""

    def __init__(self, message: str, *, retry_after_seconds: float | None, headers: Mapping[str, str]) -> None:
        """`retry_after_seconds` is None where waiting does not help."""
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.headers = headers


@dataclass(slots=True)
class Admission:
    """A request that was let in."""

    headers: Mapping[str, str]
    """`x-ratelimit-*` of the answer."""
    _give_back: Callable[[int], None]
    _num_taken: int
    _is_settled: bool = False

    def settle(self, num_used: int) -> None:
        """Give back the tokens that were taken and not used; only the first call counts."""
        if not self._is_settled:
            self._is_settled = True
            self._give_back(self._num_taken - num_used)


class RateLimits:
    """The buckets of every client; thread-safe."""

    def __init__(self, rates: Rates, *, clock: Callable[[], float]) -> None:
        self.rates = rates
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, Bucket]] = {}

    def admit(self, client: str, *, num_tokens: int) -> Admission:
        """Take one request and so many tokens.

        Raises:
            RateLimited: there is not enough left; nothing is taken.
        """
        asked = {"requests": 1, "tokens": num_tokens}
        with self._lock:
            now = self._clock()
            buckets = self._of(client, now=now)
            waits = {name: bucket.seconds_until(asked[name], now=now) for name, bucket in buckets.items()}
            short = max(waits, key=lambda name: waits[name], default=None)
            if short is not None and waits[short] > 0:
                raise self._refusal(short, bucket=buckets[short], wait=waits[short], asked=asked[short], now=now)
            for name, bucket in buckets.items():
                bucket.add(-asked[name], now=now)
            headers = _headers(buckets, now=now)
        return Admission(headers, lambda unused: self._give_back(client, unused), num_tokens)

    def _refusal(self, name: str, *, bucket: Bucket, wait: float, asked: int, now: float) -> RateLimited:
        headers = _headers({name: bucket}, now=now)
        if asked > bucket.limit:
            return RateLimited(
                f"the request may take {asked} {name}, more than the {bucket.limit} a minute that are allowed; shorten "
                "it, or ask for fewer tokens or choices",
                retry_after_seconds=None,
                headers=headers,
            )
        left = max(0, math.floor(bucket.level(now)))
        return RateLimited(
            f"{bucket.limit} {name} a minute are allowed, {left} are left and {asked} are needed; try again in "
            f"{wait:.1f} s",
            retry_after_seconds=wait,
            headers=headers,
        )

    def _give_back(self, client: str, unused: int) -> None:
        with self._lock:
            now = self._clock()
            bucket = self._of(client, now=now).get("tokens")
            if bucket is not None:
                bucket.add(unused, now=now)

    def _of(self, client: str, *, now: float) -> dict[str, Bucket]:
        if client not in self._buckets:
            if len(self._buckets) >= FORGET_AFTER:
                self._buckets = {
                    name: held
                    for name, held in self._buckets.items()
                    if any(bucket.level(now) < bucket.limit for bucket in held.values())
                }
            limits = {"requests": self.rates.requests_per_minute, "tokens": self.rates.tokens_per_minute}
            self._buckets[client] = {
                name: Bucket(limit, now=now) for name, limit in limits.items() if limit is not None
            }
        return self._buckets[client]


def _headers(buckets: Mapping[str, Bucket], *, now: float) -> dict[str, str]:
    """OpenAI's names."""
    headers = {}
    for name, bucket in buckets.items():
        headers[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level(now))))
        headers[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.limit, now=now):.3f}s"
    return headers
