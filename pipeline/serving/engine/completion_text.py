"""One running completion: its tokens become text, its times become metrics.

Owns what the engine keeps for a request beside its slot. Knows nothing of the model. The one decision: a stop string is
searched in the text that may be sent, so a client never sees a part of it, nor the log-probability of a token that
begins behind its start.
"""

from collections.abc import Callable, Sequence

from pipeline.serving.engine.detokenizer import Decoder, Detokenizer, StopStrings
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.request import Chunk, FinishReason, RankedToken, Request, TokenLogprobs
from pipeline.serving.engine.scheduler import Progress
from pipeline.serving.engine.token_rules import Ranks, TokenRules

Sink = Callable[[Sequence[Chunk]], None]
"""Where chunks go; called on the engine's thread, once a step for all requests that share it."""


class Completion:
    """State of one request from arrival to last chunk."""

    def __init__(self, request: Request, *, sink: Sink, decoder: Decoder, arrived_at: float) -> None:
        self.request = request
        self.sink = sink
        self.rules = TokenRules(request.sampling, prompt=request.prompt)
        self._decoder = decoder
        self._detokenizer = Detokenizer(decoder)
        self._stops = StopStrings(request.sampling.stop)
        self._arrived_at = arrived_at
        self._slot_at = arrived_at
        self._first_at: float | None = None
        self._last_at = arrived_at
        self._num_tokens = 0
        self._num_decoded = 0
        """Characters."""
        self._num_sent = 0
        """Characters; what may begin a stop string is decoded and not yet sent."""
        self._held: list[TokenLogprobs] = []
        """Of tokens of whose text nothing is sent."""
        self._version = ""

    def got_slot(self, *, now: float, metrics: Metrics, version: str = "") -> None:
        """Note that a slot was given, and by which version."""
        self._slot_at = now
        self._version = version
        metrics.observe("request_queue_time_seconds", now - self._arrived_at)

    def add(self, progress: Progress, *, ranks: Sequence[Ranks], now: float, metrics: Metrics) -> Chunk:
        """Take in new tokens, with their log-probabilities where they were asked for; the chunk to send.

        Raises:
            GrammarError: the request's grammar is too costly to follow.
        """
        self._note_times(len(progress.tokens), now=now, metrics=metrics)
        finish = progress.finish
        shown = progress.tokens[:-1] if finish is FinishReason.STOP else progress.tokens
        self.rules.advance(shown)
        if self.rules.is_finished:
            finish = FinishReason.STOP
        decoded = self._decoded(shown, ranks)
        if finish is not None:
            decoded += self._detokenizer.finish()
        text = self._stops.add(decoded)
        self._num_sent += len(text)
        if self._stops.is_hit:
            finish = FinishReason.STOP
        elif finish is not None:
            text += self._stops.finish()
        logprobs = self._released(is_all=finish is not None and not self._stops.is_hit)
        if finish is not None:
            self._note_end(finish, now=now, metrics=metrics)
        return Chunk(
            request_id=self.request.request_id,
            text=text,
            num_tokens=len(progress.tokens),
            finish=finish,
            logprobs=logprobs,
            version=self._version,
        )

    def _decoded(self, tokens: Sequence[int], ranks: Sequence[Ranks]) -> str:
        """The text that became certain; one token after the other where each one's place in it is wanted."""
        if not ranks:
            return self._detokenizer.add(tokens)
        pieces = []
        for token, rank in zip(tokens, ranks, strict=False):  # a stop token has ranks, and no text
            self._held.append(
                TokenLogprobs(
                    chosen=self._ranked(token, rank.logprob),
                    top=tuple(self._ranked(*entry) for entry in rank.top),
                    text_offset=self._num_decoded,
                )
            )
            pieces.append(self._detokenizer.add([token]))
            self._num_decoded += len(pieces[-1])
        return "".join(pieces)

    def _released(self, *, is_all: bool) -> tuple[TokenLogprobs, ...]:
        """Those whose text is sent, in whole or in part, or all that are left."""
        num = len(self._held)
        while not is_all and num and self._held[num - 1].text_offset >= self._num_sent:
            num -= 1
        released, self._held = tuple(self._held[:num]), self._held[num:]
        return released

    def _ranked(self, token: int, logprob: float) -> RankedToken:
        text, encoded = self._decoder.spelled(token)
        return RankedToken(token=token, logprob=logprob, text=text, bytes=encoded)

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
