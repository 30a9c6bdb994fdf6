"""One model over several hosts: a leader that serves, and followers that make the same calls.

Owns how the processes meet, how followers learn what to run, and how the loss of one becomes known. Knows nothing of
Ray, HTTP or text. The one decision: what the leader tells its followers is each call of an executable with its host
arrays, in order, so whatever the scheduler or a grammar decided is decided once, and a follower needs none of it.

jax's own collectives carry the numbers; a connection of `multiprocessing` beside them carries the calls. It is
authenticated by a key that both sides were given, because what arrives on it is unpickled. A process that dies closes
it at once, which is how the others know: jax's coordination service takes a hundred seconds to miss a heartbeat.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, Protocol

import jax

from pipeline.errors import ClusterError
from pipeline.serving.replica_settings import ReplicaSettings

_LOG = logging.getLogger(__name__)
MEETING_SECONDS = 120.0
"""Until every process of a replica is there."""
COMPILING_SECONDS = 3600.0
"""Until every process has compiled; the deadline of the deployment is usually the shorter one."""
LOSS_SECONDS = 2.0
"""How long a failed collective waits for the connection to say that its peer is gone."""
SHUTDOWN_SECONDS = 10
_HERE, _COMPILED, _FAILED = "here", "compiled", "failed"
_SERVE, _GO, _RUN, _END = "serve", "go", "run", "end"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlan:
    """What one process of a replica must know to find the others."""

    coordinator: str
    """`host:port` of jax's coordination service, which the leader runs."""
    control: tuple[str, int]
    """Where the leader tells what to run."""
    num_hosts: int
    rank: int
    """0 is the leader."""
    key: bytes = field(repr=False)


class Executor(Protocol):
    """What a leader and a follower need of an executor."""

    before_run: Callable[[Any, tuple[Any, ...]], None]
    before_first_run: Callable[[], None]


def join(plan: HostPlan) -> None:
    """Make the devices of all hosts known to jax here; to be called before anything else of jax.

    Raises:
        ClusterError: jax has devices already, or the others do not come.
    """
    # Without it the CPU backend knows no devices but its own; other backends do not read it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            plan.coordinator,
            num_processes=plan.num_hosts,
            process_id=plan.rank,
            initialization_timeout=int(MEETING_SECONDS),
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
        jax.devices()  # each process tells the others its devices when it first looks, and waits for theirs
    except RuntimeError as error:
        raise ClusterError(
            f"host process {plan.rank} of {plan.num_hosts} could not join the others at {plan.coordinator}: "
            f"{str(error).splitlines()[0]}",
            hint="every host must reach the leader's address; a model over several hosts needs a process of its own",
        ) from error


class Leader:
    """The connections of the process that serves, rank 0."""

    def __init__(self, *, address: str, num_hosts: int) -> None:
        """Listen at `address`, by which the other hosts reach this one."""
        self._num_hosts = num_hosts
        self._key = secrets.token_bytes(32)
        self._listener = Listener((address, 0), backlog=num_hosts, authkey=self._key)
        self._coordinator = f"{address}:{_free_port(address)}"
        self._followers: dict[Connection, str] = {}
        self._num_compiled = 0
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._is_ended = False
        self._on_lost: Callable[[str], None] = _LOG.error

    def plan(self, rank: int) -> HostPlan:
        """What the process of this rank is given."""
        return HostPlan(
            coordinator=self._coordinator,
            control=self._listener.address,
            num_hosts=self._num_hosts,
            rank=rank,
            key=self._key,
        )

    def plan_of(self, rank: int) -> dict[str, Any]:
        """`plan` in plain values, which a process can take in before it loads jax."""
        return asdict(self.plan(rank))

    def meet(self) -> None:
        """Wait for every follower, and join their devices.

        Raises:
            ClusterError: one does not come.
        """
        accepting = threading.Thread(target=self._accept, name="meet", daemon=True)
        accepting.start()
        join(self.plan(0))
        accepting.join(timeout=MEETING_SECONDS)
        if len(self._followers) < self._num_hosts - 1:
            raise ClusterError(
                f"{len(self._followers)} of {self._num_hosts - 1} followers came in {MEETING_SECONDS:g} s"
            )
        threading.Thread(target=self._watch, name="followers", daemon=True).start()

    def serve(self, settings: ReplicaSettings) -> None:
        """Tell the followers what to load; every choice in it is made.

        Raises:
            ClusterError: a follower is gone.
        """
        self._tell((_SERVE, settings))

    def lead(self, executor: Executor) -> None:
        """From now on every call of `executor` is made by the followers too."""
        executor.before_run = lambda key, arguments: self._tell((_RUN, key, arguments))
        executor.before_first_run = self._await_compiled

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the reason, from another thread, when a follower is lost."""
        self._on_lost = tell
        if self._lost is not None:
            tell(self._lost)

    def why(self, error: BaseException) -> str | None:
        """Which follower is behind a failed call, or None where all are there."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, timeout=LOSS_SECONDS)
            return self._lost

    def end(self) -> None:
        """Let the followers end; harmless where they are gone."""
        with self._changed:
            self._is_ended = True
        for follower in self._followers:
            try:
                follower.send((_END,))
            except OSError:
                continue
        self._listener.close()

    def _tell(self, message: tuple[Any, ...]) -> None:
        if self._lost is not None:
            raise ClusterError(self._lost)
        for follower, name in self._followers.items():
            try:
                follower.send(message)
            except OSError as error:
                raise ClusterError(f"{name} is gone: {error}") from error

    def _accept(self) -> None:
        while len(self._followers) < self._num_hosts - 1:
            try:
                follower = self._listener.accept()
                _, name = follower.recv()
            except (AuthenticationError, OSError, EOFError) as error:
                _LOG.warning("a stranger at %s was turned away: %s", self._listener.address, error)
                continue
            self._followers[follower] = name

    def _await_compiled(self) -> None:
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._lost is not None or self._num_compiled == len(self._followers), timeout=COMPILING_SECONDS
            )
        if not done:
            raise ClusterError(f"the followers have not compiled after {COMPILING_SECONDS:g} s")
        self._tell((_GO,))

    def _watch(self) -> None:
        while self._lost is None:
            for follower in wait(list(self._followers)):
                assert isinstance(follower, Connection)
                reason = self._heard(follower)
                with self._changed:
                    if self._is_ended:
                        return
                    self._lost = self._lost or reason
                    self._changed.notify_all()
        self._on_lost(self._lost)

    def _heard(self, follower: Connection) -> str | None:
        """Take in one message; the reason where it is the last one."""
        try:
            kind, *rest = follower.recv()
        except (EOFError, OSError):
            return f"{self._followers[follower]} is gone; the model cannot be computed without its part"
        if kind == _FAILED:
            return f"{self._followers[follower]} failed: {rest[0]}"
        with self._changed:
            self._num_compiled += kind == _COMPILED
            self._changed.notify_all()
        return None


class Follower:
    """The connection of one of the other processes."""

    def __init__(self, plan: HostPlan) -> None:
        """Find the leader, and join the devices of all.

        Raises:
            ClusterError: the leader is not there.
        """
        name = f"host process {plan.rank} (pid {os.getpid()} on {socket.gethostname()})"
        self._leader = _connected(plan)
        self._leader.send((_HERE, name))
        join(plan)

    def settings(self) -> ReplicaSettings:
        """What the leader says is served.

        Raises:
            ClusterError: the leader is gone.
        """
        settings: ReplicaSettings = self._next(_SERVE)[1]
        return settings

    def meet(self, executor: Executor) -> None:
        """Compile at one's own pace, and make the first calls with the others: a collective does not wait for long."""

        def together() -> None:
            self._leader.send((_COMPILED,))
            self._next(_GO)

        executor.before_first_run = together

    def follow(self, run: Callable[..., Any]) -> None:
        """Make the leader's calls until it ends.

        Raises:
            ClusterError: the leader is gone.
        """
        while True:
            kind, *call = self._next(_RUN, _END)
            if kind == _END:
                return
            key, arguments = call
            # An error of the device must be met here, not some calls later.
            jax.block_until_ready(run(key, *arguments))

    def failed(self, error: BaseException) -> None:
        """Tell the leader why this process ends."""
        with contextlib.suppress(OSError):  # it is gone
            self._leader.send((_FAILED, f"{type(error).__name__}: {error}"))

    def _next(self, *kinds: str) -> tuple[Any, ...]:
        try:
            message: tuple[Any, ...] = self._leader.recv()
        except (EOFError, OSError) as error:
            raise ClusterError("the leader of this replica is gone") from error
        assert message[0] in kinds, f"{message[0]} came where {kinds} was due"
        return message


def decided(settings: ReplicaSettings, *, dtype: str) -> ReplicaSettings:
    """Settings as followers get them: nothing is left for a host to choose by what it sees."""
    return replace(settings, dtype=dtype, min_tokens_per_second=0.0)


def _connected(plan: HostPlan) -> Connection:
    deadline = time.monotonic() + MEETING_SECONDS
    while True:
        try:
            return Client(plan.control, authkey=plan.key)
        except AuthenticationError as error:
            raise ClusterError(f"the leader at {plan.control} refused the key of host process {plan.rank}") from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(f"the leader does not answer at {plan.control}: {error}") from error
            time.sleep(0.2)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
