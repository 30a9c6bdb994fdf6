"""The engine: one thread that owns the device and steps the scheduler.

Owns the life of requests from submission to last chunk, and what fails with what. Knows nothing of HTTP or asyncio. The
one decision: one thread touches jax and the scheduler; everybody else leaves a command in a queue, and whatever goes
wrong inside one request ends that request alone, while a failing device ends the engine, says so, and never hangs.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.completion_text import Completion, Sink
from pipeline.serving.engine.detokenizer import Decoder
from pipeline.serving.engine.engine_thread import STALL_SECONDS, EngineThread, EngineUnavailable
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.request import Chunk, FinishReason, Request
from pipeline.serving.engine.scheduler import Decode, Limits, Prefill, Progress, Scheduler, Shared
from pipeline.serving.engine.token_rules import Chosen, Ranks, TokenRules

_LOG = logging.getLogger(__name__)
SWAP_WAIT_SECONDS = 30.0
"""How long an exchange of parameters holds new requests back while others finish."""


class Executor(Protocol):
    """What the engine needs of the device."""

    @property
    def buckets(self) -> Buckets:
        """The shapes it runs."""
        ...

    def warm_up(self, *, on_progress: Callable[[int, int], None] | None = None) -> float:
        """Compile everything; seconds."""
        ...

    def prefill(self, step: Prefill, *, rules: TokenRules) -> Chosen:
        """Run a chunk."""
        ...

    def decode(self, step: Decode, *, rules: Sequence[TokenRules]) -> list[Chosen]:
        """Run decode steps."""
        ...

    def shared(self, step: Shared, *, rules: Sequence[TokenRules]) -> list[Chosen]:
        """Run chunks of prompts and one decode step in one pass; only where `buckets.shared` has sizes."""
        ...

    def place(self, leaves: Mapping[str, Any]) -> Any:
        """New parameters beside those in use; for any thread."""
        ...

    def exchange(self, placed: Any) -> Any:
        """Use them from the next step on; returns those in use until now."""
        ...

    def on_host(self, arrays: Any) -> Mapping[str, Any]:
        """What `exchange` returned, as `place` takes it; for any thread."""
        ...


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    sink: Sink
    time: float


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Swapped:
    """What an exchange of parameters did."""

    leaves: Mapping[str, Any]
    """The old ones in the host's memory; `swap` takes them back."""
    num_cut_over: int
    """Requests that began with the old ones and end with the new ones: those that outlasted the wait."""
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class _Swap:
    placed: Any
    label: str
    deadline: float
    done: "Future[tuple[Any, int]]"


class Engine(EngineThread):
    """Continuous batching over one executor."""

    def __init__(
        self, executor: Executor, *, decoder: Decoder, limits: Limits, metrics: Metrics, strict: bool = False
    ) -> None:
        """`strict` makes a compile after warm-up end the engine."""
        super().__init__(
            "engine",
            warm_up=executor.warm_up,
            num_executables=executor.buckets.num_executables,
            metrics=metrics,
            strict=strict,
        )
        self.limits = limits
        self.version = ""
        """Label of the parameters in use; answers carry it."""
        self._executor = executor
        self._decoder = decoder
        self._scheduler = Scheduler(limits, buckets=executor.buckets)
        self._completions: dict[str, Completion] = {}
        self._commands: deque[_Submit | _Cancel] = deque()
        self._swaps: deque[_Swap] = deque()
        self._outgoing: dict[Sink, list[Chunk]] = {}

    def submit(self, request: Request, *, sink: Sink) -> None:
        """Queue a request; chunks go to `sink`, the last one with `finish`.

        Raises:
            EngineUnavailable: it starts, drains, is full or has failed.
        """
        with self._wake:
            self._check_is_open()
            if self._scheduler.num_waiting + len(self._commands) >= self.limits.max_waiting:
                raise EngineUnavailable(f"{self.limits.max_waiting} requests wait already")
            self._commands.append(_Submit(request, sink, time.monotonic()))
            self._wake.notify()

    def cancel(self, request_id: str, *, reason: str = "client") -> None:
        """End a request before its next step; harmless where it is unknown or finished."""
        with self._wake:
            self._commands.append(_Cancel(request_id, reason))
            self._wake.notify()

    def swap(self, leaves: Mapping[str, Any], *, label: str = "", wait_seconds: float = SWAP_WAIT_SECONDS) -> Swapped:
        """Exchange the parameters (of the executor's `leaves_of`) between two steps, and wait until it is done.

        What runs ends with the old parameters: new requests wait until then, but no longer than `wait_seconds`. What
        still runs after that goes on with the new ones. `label` becomes the engine's `version`.

        Raises:
            ParameterError: a name, shape or dtype differs; the old ones stay.
            EngineUnavailable: the engine starts, drains, has failed or stalls; the old ones stay.
        """
        started = time.monotonic()
        placed = self._executor.place(leaves)
        swap = _Swap(placed, label, time.monotonic() + wait_seconds, Future())
        with self._wake:
            self._check_is_open()
            self._swaps.append(swap)
            self._wake.notify()
        try:
            before, num_cut_over = swap.done.result(timeout=wait_seconds + STALL_SECONDS)
        except TimeoutError as error:
            if swap.done.cancel():
                raise EngineUnavailable("no step ended while new parameters waited; the old ones stay") from error
            before, num_cut_over = swap.done.result()  # it was just begun
        return Swapped(
            leaves=self._executor.on_host(before),
            num_cut_over=num_cut_over,
            waited_seconds=time.monotonic() - started,
        )

    def why_unbalanced(self) -> str | None:
        """What is wrong with the slot accounting of an idle engine, or None."""
        if self._completions or self._scheduler.has_work:
            return f"{len(self._completions)} completions and {self._scheduler.num_running} slots are in use"
        return self._scheduler.why_unbalanced()

    def _is_busy(self) -> bool:
        return bool(self._commands) or bool(self._swaps) or self._scheduler.has_work

    @property
    def _num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def _num_waiting(self) -> int:
        return self._scheduler.num_waiting + len(self._commands)

    def _serve(self) -> None:
        while self._wait_for_work():
            self._step()

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._is_busy() or self._is_stopping):
                self._publish_load()
                self._wake.wait()
            if self._is_stopping:
                return False
            commands = tuple(self._commands)
        if not self._scheduler.has_work:
            self._last_step_at = time.monotonic()  # idle time is no stall
        for command in commands:
            if isinstance(command, _Submit):
                self._accept(command)
            else:
                self._end(command.request_id, FinishReason.ABORT, reason=command.reason)
            self._commands.popleft()  # only now: what is in no queue looks idle to `stop`
        self._deliver()
        return True

    def _accept(self, command: _Submit) -> None:
        request = command.request
        self.metrics.count("prompt_tokens_total", len(request.prompt))
        try:
            completion = Completion(request, sink=command.sink, decoder=self._decoder, arrived_at=command.time)
        except Exception as error:  # a request's own boundary: it fails alone
            self._failed(request.request_id, error, sink=command.sink)
            return
        self._completions[request.request_id] = completion
        self._scheduler.add(request, now=command.time)

    def _step(self) -> None:
        now = time.monotonic()
        self._swap_when_due(now=now)
        for request_id, _ in () if self._swaps else self._scheduler.admit(now=now):
            self._completions[request_id].got_slot(now=now, metrics=self.metrics, version=self.version)
        shared = self._scheduler.next_shared()
        if shared is not None:
            self._share(shared)
        else:
            self._decode()
        if self._executor.buckets.chunks:
            self._prefill()
        self._deliver()
        self._last_step_at = time.monotonic()
        self._publish_load()
        self._check_compiles()

    def _share(self, step: Shared) -> None:
        for prefill in step.prefills:
            self._count_prefix(prefill)
        chosen = self._executor.shared(step, rules=[self._completions[name].rules for name in step.asking])
        self.metrics.count("engine_steps_total", label="shared")
        self.metrics.count("padding_tokens_total", step.padded_to - step.num_tokens)
        if step.decode is not None:
            self._decoded(step.decode, chosen)
        first = dict(zip(step.asking, chosen, strict=True))
        for prefill in step.prefills:
            self._prefilled(prefill, first.get(prefill.request_id, Chosen([])))

    def _decode(self) -> None:
        decode = self._scheduler.next_decode()
        if decode is None:
            return
        rules = [self._completions[row.request_id].rules for row in decode.rows]
        chosen = self._executor.decode(decode, rules=rules)
        self.metrics.count("engine_steps_total", label="decode")
        num_steps = max(len(new.tokens) for new in chosen)
        self.metrics.count("padding_tokens_total", (decode.padded_to - len(decode.rows)) * num_steps)
        self._decoded(decode, chosen)
        self._deliver()

    def _decoded(self, decode: Decode, chosen: Sequence[Chosen]) -> None:
        """Of `chosen`, the first are those of the rows."""
        of_rows = chosen[: len(decode.rows)]
        steps = self._scheduler.decoded(decode, tokens=[new.tokens for new in of_rows])
        for progress, new in zip(steps, of_rows, strict=True):
            self._progressed(progress, ranks=new.ranks)

    def _prefill(self) -> None:
        spent = 0
        while (prefill := self._scheduler.next_prefill(budget=self._scheduler.prefill_budget - spent)) is not None:
            spent += prefill.padded_to
            self._count_prefix(prefill)
            first = self._executor.prefill(prefill, rules=self._completions[prefill.request_id].rules)
            self.metrics.count("engine_steps_total", label="prefill")
            self.metrics.count("padding_tokens_total", prefill.padded_to - len(prefill.tokens))
            self._prefilled(prefill, first)

    def _count_prefix(self, prefill: Prefill) -> None:
        if prefill.is_first:
            num_prompt = len(self._completions[prefill.request_id].request.prompt)
            self.metrics.count("prefix_cache_queries_total", num_prompt)
            self.metrics.count("prefix_cache_hits_total", prefill.start)

    def _prefilled(self, prefill: Prefill, first: Chosen) -> None:
        prefilled = self._scheduler.prefilled(prefill, tokens=first.tokens)
        if prefilled is not None:
            self._progressed(prefilled, ranks=first.ranks)

    def _swap_when_due(self, *, now: float) -> None:
        while self._swaps and (not self._scheduler.num_running or now >= self._swaps[0].deadline):
            swap = self._swaps.popleft()
            if not swap.done.set_running_or_notify_cancel():
                continue
            num_cut_over = self._scheduler.num_running
            if num_cut_over:
                _LOG.warning("%d requests go on with new parameters", num_cut_over)
            before = self._executor.exchange(swap.placed)
            self._scheduler.forget_prefixes()
            self.version = swap.label
            swap.done.set_result((before, num_cut_over))

    def _progressed(self, progress: Progress, *, ranks: Sequence[Ranks]) -> None:
        completion = self._completions[progress.request_id]
        try:
            chunk = completion.add(progress, ranks=ranks, now=time.monotonic(), metrics=self.metrics)
        except Exception as error:  # a request's own boundary: it fails alone
            self._forget(progress.request_id)
            self._failed(progress.request_id, error, sink=completion.sink)
            return
        self._outgoing.setdefault(completion.sink, []).append(chunk)
        if chunk.finish is not None:
            self._forget(progress.request_id)

    def _end(self, request_id: str, finish: FinishReason, *, reason: str, error: str = "") -> None:
        completion = self._forget(request_id)
        if completion is not None:
            self._finish(request_id, finish, sink=completion.sink, reason=reason, error=error)

    def _failed(self, request_id: str, error: Exception, *, sink: Sink) -> None:
        _LOG.error("request %s failed", request_id, exc_info=error)
        text = f"{type(error).__name__}: {error}"
        self._finish(request_id, FinishReason.ERROR, sink=sink, reason="error", error=text)

    def _finish(self, request_id: str, finish: FinishReason, *, sink: Sink, reason: str, error: str) -> None:
        self.metrics.count("aborted_requests_total", label=reason)
        last = Chunk(request_id=request_id, text="", num_tokens=0, finish=finish, error=error)
        self._outgoing.setdefault(sink, []).append(last)

    def _forget(self, request_id: str) -> Completion | None:
        """The one place where a request leaves; its slot is free afterwards whatever it was doing."""
        self._scheduler.remove(request_id)
        return self._completions.pop(request_id, None)

    def _deliver(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for sink, chunks in outgoing.items():
            try:
                sink(chunks)
            except Exception:  # a reader that is gone must not end the others
                _LOG.exception("a reader of %d chunks failed", len(chunks))
                for chunk in chunks:
                    self._forget(chunk.request_id)

    def _abort_all(self) -> None:
        with self._wake:
            commands, self._commands = self._commands, deque()
            self._is_draining = True
        for command in commands:
            if isinstance(command, _Submit):
                self._accept(command)
        failure = self._failure
        while self._swaps:
            done = self._swaps.popleft().done
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineUnavailable(failure or "the server shut down"))
        for request_id in list(self._completions):
            finish = FinishReason.ABORT if failure is None else FinishReason.ERROR
            reason = "shutdown" if failure is None else "error"
            self._end(request_id, finish, reason=reason, error=failure or "the server shut down")
        self._deliver()

    def _publish_load(self) -> None:
        super()._publish_load()
        capacity = self.limits.slots * self.limits.context
        self.metrics.gauge("kv_cache_usage_perc", self._scheduler.num_cached_tokens / capacity)
