"""One running completion: its tokens become text, its times become metrics.

Owns what the engine keeps for a request beside its slot. Knows nothing of the model. The one decision: a stop string is
searched in the text that may be sent, so a client never sees a part of it.
"""

from collections.abc import Callable, Sequence

from pipeline.serving.detokenizer import Decoder, Detokenizer, StopStrings
from pipeline.serving.metrics import Metrics
from pipeline.serving.request import Chunk, FinishReason, Request
from pipeline.serving.scheduler import Progress

Sink = Callable[[Sequence[Chunk]], None]
"""Where chunks go; called on the engine's thread, once a step for all requests that share it."""


class Completion:
    """State of one request from arrival to last chunk."""

    def __init__(self, request: Request, *, sink: Sink, decoder: Decoder, arrived_at: float) -> None:
        self.request = request
        self.sink = sink
        self._detokenizer = Detokenizer(decoder)
        self._stops = StopStrings(request.sampling.stop)
        self._arrived_at = arrived_at
        self._slot_at = arrived_at
        self._first_at: float | None = None
        self._last_at = arrived_at
        self._num_tokens = 0
        self._version = ""

    def got_slot(self, *, now: float, metrics: Metrics, version: str = "") -> None:
        """Note that a slot was given, and by which version."""
        self._slot_at = now
        self._version = version
        metrics.observe("request_queue_time_seconds", now - self._arrived_at)

    def add(self, progress: Progress, *, now: float, metrics: Metrics) -> Chunk:
        """Take in new tokens; the chunk to send."""
        self._note_times(len(progress.tokens), now=now, metrics=metrics)
        finish = progress.finish
        shown = progress.tokens[:-1] if finish is FinishReason.STOP else progress.tokens
        text = self._detokenizer.add(shown)
        if finish is not None:
            text += self._detokenizer.finish()
        text = self._stops.add(text)
        if self._stops.is_hit:
            finish = FinishReason.STOP
        elif finish is not None:
            text += self._stops.finish()
        if finish is not None:
            self._note_end(finish, now=now, metrics=metrics)
        return Chunk(
            request_id=self.request.request_id,
            text=text,
            num_tokens=len(progress.tokens),
            finish=finish,
            version=self._version,
        )

    def _note_times(self, num_new: int, *, now: float, metrics: Metrics) -> None:
        if num_new == 0:
            return
        if self._first_at is None:
            self._first_at = now
            metrics.observe("time_to_first_token_seconds", now - self._arrived_at)
            metrics.observe("request_prefill_time_seconds", now - self._slot_at)
        else:
            metrics.observe("inter_token_latency_seconds", (now - self._last_at) / num_new, times=num_new)
        self._last_at = now
        self._num_tokens += num_new
        metrics.count("generation_tokens_total", num_new)

    def _note_end(self, finish: FinishReason, *, now: float, metrics: Metrics) -> None:
        metrics.count("request_success_total", label=finish.value)
        metrics.observe("e2e_request_latency_seconds", now - self._arrived_at)
        metrics.observe("request_decode_time_seconds", now - (self._first_at or now))
