"""Who may work on what, and until when.

Owns leases on names (`runs/<run>`, `fingerprints/<fingerprint>`) in the store. Time is passed in. The one decision: a
lease is a numbered object created conditionally; the highest number holds, and the number is the fencing token. A
holder that is gone (expired, released, or a dead process of this machine) is succeeded by creating the next number,
which exactly one contender can do.
"""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import psutil

from pipeline.artifacts.store import Store
from pipeline.errors import LeaseError

LEASE_SECONDS = 20.0
RENEW_SECONDS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds leases."""

    host: str
    pid: int
    process_started_at: float

    @classmethod
    def current(cls) -> "Holder":
        """This process."""
        return cls(host=socket.gethostname(), pid=os.getpid(), process_started_at=psutil.Process().create_time())

    def is_known_dead(self) -> bool:
        """True where the process was of this machine and is gone; False where that cannot be known."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            return (
                process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - self.process_started_at) > 1.0
            )
        except psutil.NoSuchProcess:
            return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """One holder's right to a name."""

    name: str
    number: int
    """The fencing number: higher is newer."""
    holder: Holder
    expires_at: float
    released: bool = False

    @property
    def key(self) -> str:
        """Where it is stored."""
        return f"leases/{self.name}/{self.number:08d}.json"

    def to_json(self) -> bytes:
        """As stored."""
        return json.dumps(asdict(self)).encode()

    def is_held(self, *, now: float) -> bool:
        """True while nobody else may take the name."""
        return not self.released and self.expires_at > now and not self.holder.is_known_dead()


class Leases:
    """Leases of one holder in one store."""

    def __init__(self, store: Store, *, holder: Holder, clock: Callable[[], float]) -> None:
        self._store = store
        self._holder = holder
        self._clock = clock

    def newest(self, name: str) -> Lease | None:
        """The lease with the highest number, held or not."""
        names = [entry for entry in self._store.list(f"leases/{name}") if entry.endswith(".json")]
        for entry in reversed(names):
            data = self._store.read(f"leases/{name}/{entry}")
            if data is not None:
                fields = json.loads(data)
                return Lease(**{**fields, "holder": Holder(**fields["holder"])})
        return None

    def acquire(self, name: str) -> Lease | None:
        """Take the name if nobody holds it; None where somebody does."""
        now = self._clock()
        newest = self.newest(name)
        if newest is not None and newest.is_held(now=now):
            return None
        number = 1 if newest is None else newest.number + 1
        lease = Lease(name=name, number=number, holder=self._holder, expires_at=now + LEASE_SECONDS)
        return lease if self._store.create(lease.key, lease.to_json()) else None

    def renew(self, lease: Lease) -> Lease:
        """Push the expiry out.

        Raises:
            LeaseError: somebody with a higher number has taken over.
        """
        self.check(lease)
        renewed = replace(lease, expires_at=self._clock() + LEASE_SECONDS)
        self._store.write(renewed.key, renewed.to_json())
        return renewed

    def check(self, lease: Lease) -> None:
        """Raise `LeaseError` where the lease is no longer the newest."""
        newest = self.newest(lease.name)
        if newest is None or newest.number != lease.number:
            holder = f"process {newest.holder.pid} on {newest.holder.host}" if newest else "nobody"
            raise LeaseError(f"the lease on {lease.name} (number {lease.number}) was taken over by {holder}")

    def release(self, lease: Lease) -> None:
        """Give the name back; nothing happens where it was taken over."""
        newest = self.newest(lease.name)
        if newest is not None and newest.number == lease.number:
            self._store.write(lease.key, replace(lease, released=True).to_json())
