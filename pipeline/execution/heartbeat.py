"""Keeps leases alive while the driver works.

Owns one thread. The one decision: a lost lease is remembered, not raised in the thread; the runner asks before every
write that needs it, and stops.
"""

import threading

from pipeline.errors import LeaseError, StoreError
from pipeline.execution.leases import RENEW_SECONDS, Lease, Leases


class Heartbeat:
    """Renews every lease it holds; a context manager that releases what is left."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._held: dict[str, Lease] = {}
        self._lost: dict[str, LeaseError] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_all, name="lease-heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        for name in list(self._held):
            self.drop(name)

    def acquire(self, name: str) -> Lease | None:
        """Take a name and keep it; None where somebody else holds it."""
        lease = self._leases.acquire(name)
        if lease is not None:
            with self._lock:
                self._held[name] = lease
        return lease

    def drop(self, name: str) -> None:
        """Release a name."""
        with self._lock:
            lease = self._held.pop(name, None)
            if lease is not None and name not in self._lost:
                self._leases.release(lease)

    def check(self, name: str) -> None:
        """Raise `LeaseError` where the name is no longer ours."""
        with self._lock:
            if name in self._lost:
                raise self._lost[name]
            self._leases.check(self._held[name])

    def _renew_all(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            with self._lock:
                for name, lease in list(self._held.items()):
                    try:
                        self._held[name] = self._leases.renew(lease)
                    except LeaseError as error:
                        self._lost[name] = error
                    except StoreError:
                        continue  # storage is away for a moment; the expiry gives it time to come back
