"""Which request runs next, in which slot, with how many tokens.

Owns slots and queue. Pure: values in, values out, the time is passed in; knows nothing of jax, threads or text. The one
decision: between two decode steps, or in one pass with a step, at most one chunk's tokens of prompts are computed, so
the time between two tokens of a running request is bounded by one chunk, however long or many the prompts that arrive.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.serving.engine.buckets import Buckets, smallest_fit
from pipeline.serving.engine.prefix_index import Prefix, PrefixIndex, Tokens, common_beginning
from pipeline.serving.engine.request import FinishReason, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one replica holds."""

    slots: int
    context: int
    """Tokens of prompt plus completion."""
    chunk_tokens: int
    decode_steps: int
    max_waiting: int = 1024
    prefix_granularity: int = 0
    """Beginnings that prompts share are taken from the cache in multiples of so many tokens; 0 computes each prompt."""
    is_deterministic: bool = False
    """Reuse only what whole prefill chunks computed, so that a hit changes no bit."""
    max_logprobs: int = 5
    """Alternatives a token that are reported; 0 compiles no log-probabilities."""

    @property
    def reuse_granularity(self) -> int:
        """Of prefixes, in tokens; 0 where none is reused."""
        return self.chunk_tokens if self.prefix_granularity and self.is_deterministic else self.prefix_granularity


@dataclass(kw_only=True, slots=True, eq=False)
class Running:
    """A request in a slot or in the queue."""

    request: Request
    arrived_at: float
    prompt: Tokens
    """The request's, as an array."""
    slot: int = -1
    num_cached: int = 0
    """Tokens whose keys and values are in the cache."""
    has_begun: bool = False
    """True once a chunk of its prompt was computed."""
    generated: list[int] = field(default_factory=list)

    @property
    def is_prefilled(self) -> bool:
        """True once the whole prompt is in the cache."""
        return self.num_cached >= len(self.request.prompt)

    @property
    def tokens_left(self) -> int:
        """Tokens it may still generate."""
        return self.request.sampling.max_tokens - len(self.generated)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """Run `tokens` of one prompt from position `start` in `slot`; where `is_last`, the sampled token counts.

    Where `copies_from` is a slot, that slot's first `start` positions are copied first; `copied_length` is a bucket
    that holds them.
    """

    request_id: str
    slot: int
    tokens: tuple[int, ...]
    start: int
    is_last: bool
    padded_to: int
    attention_length: int
    is_first: bool = False
    copies_from: int | None = None
    copied_length: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRow:
    """One request in a decode call: `token` stands at `position` and is not yet in the cache."""

    request_id: str
    slot: int
    token: int
    position: int
    budget: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode:
    """Up to `steps` tokens for each row."""

    rows: tuple[DecodeRow, ...]
    steps: int
    padded_to: int
    attention_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """One pass over chunks of several prompts and, for each row of `decode`, one token."""

    prefills: tuple[Prefill, ...]
    decode: Decode | None
    padded_to: int
    attention_length: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are no padding."""
        return sum(len(one.tokens) for one in self.prefills) + len(self.rows)

    @property
    def rows(self) -> tuple[DecodeRow, ...]:
        """Those of `decode`."""
        return () if self.decode is None else self.decode.rows

    @property
    def ending(self) -> tuple[Prefill, ...]:
        """Prompts that this pass completes; their first token follows."""
        return tuple(one for one in self.prefills if one.is_last)

    @property
    def asking(self) -> tuple[str, ...]:
        """Requests that get a token: those of `rows`, then those of `ending`."""
        return (*(row.request_id for row in self.rows), *(one.request_id for one in self.ending))


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """New tokens of one request."""

    request_id: str
    tokens: tuple[int, ...]
    finish: FinishReason | None


class Scheduler:
    """Slots, queue, and the next step."""

    def __init__(self, limits: Limits, *, buckets: Buckets) -> None:
        self._limits = limits
        self._buckets = buckets
        self._waiting: deque[Running] = deque()
        self._running: OrderedDict[str, Running] = OrderedDict()
        self._slots = PrefixIndex(limits.slots, granularity=limits.reuse_granularity)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the cache that belong to a running request."""
        return sum(sequence.num_cached for sequence in self._running.values())

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Every request that is not finished."""
        return (*self._running, *(sequence.request.request_id for sequence in self._waiting))

    def add(self, request: Request, *, now: float) -> None:
        """Queue a request."""
        prompt = np.asarray(request.prompt, np.int32)
        self._waiting.append(Running(request=request, arrived_at=now, prompt=prompt))

    def remove(self, request_id: str) -> bool:
        """Forget a request wherever it is and free its slot; False where it is unknown."""
        sequence = self._running.pop(request_id, None)
        if sequence is not None:
            self._slots.release(sequence.slot, tokens=self._reusable(sequence))
            return True
        for waiting in self._waiting:
            if waiting.request.request_id == request_id:
                self._waiting.remove(waiting)
                return True
        return False

    def admit(self, *, now: float) -> list[tuple[str, float]]:
        """Give free slots to the longest waiting; returns (request, seconds it waited)."""
        admitted = []
        while self._waiting and self._slots.free:
            sequence = self._waiting.popleft()
            held = self._slots.take(sequence.prompt)
            sequence.slot, sequence.num_cached = held.slot, held.num_tokens
            self._running[sequence.request.request_id] = sequence
            admitted.append((sequence.request.request_id, now - sequence.arrived_at))
        return admitted

    def next_decode(self) -> Decode | None:
        """The decode call of this step, or None where nothing decodes."""
        ready = [sequence for sequence in self._running.values() if sequence.is_prefilled]
        if not ready:
            return None
        steps = self._num_steps(ready)
        rows = tuple(
            DecodeRow(
                request_id=sequence.request.request_id,
                slot=sequence.slot,
                token=sequence.generated[-1],
                position=sequence.num_cached,
                budget=min(steps, sequence.tokens_left),
            )
            for sequence in ready
        )
        reach = max(row.position + row.budget for row in rows)
        return Decode(
            rows=rows,
            steps=steps,
            padded_to=smallest_fit(len(rows), self._buckets.decode_batches),
            attention_length=smallest_fit(reach, self._buckets.decode_attention),
        )

    @property
    def prefill_budget(self) -> int:
        """Padded prompt tokens to compute before the next decode; more than a chunk where nothing decodes."""
        return self._limits.chunk_tokens if self._is_decoding else self._buckets.chunks[-1]

    @property
    def _is_decoding(self) -> bool:
        return any(sequence.is_prefilled for sequence in self._running.values())

    def next_prefill(self, *, budget: int) -> Prefill | None:
        """The next prefill chunk (of the request that came first) where it takes at most `budget` padded tokens."""
        sequence = next((one for one in self._running.values() if not one.is_prefilled), None)
        if sequence is None:
            return None
        start, source = self._beginning(sequence)
        left, largest = len(sequence.prompt) - start, self._buckets.chunks[-1]
        # Larger than a chunk only whole: padding up to it would cost more than it saves.
        is_long = left >= largest and budget >= largest
        num_tokens = min(left, largest if is_long else self._limits.chunk_tokens)
        padded_to = smallest_fit(num_tokens, self._buckets.chunks)
        if padded_to > budget:
            return None
        length = smallest_fit(start + num_tokens, self._buckets.prefill_attention)
        return self._chunk(sequence, start, source, num_tokens, padded_to=padded_to, attention_length=length)

    def next_shared(self) -> Shared | None:
        """A pass over all that can be computed now; None where passes are not shared or no prompt waits."""
        if not self._buckets.shared:
            return None
        length = self._buckets.decode_attention[-1]
        left = self._shared_budget()
        prefills: list[Prefill] = []
        begun: list[Tokens] = []
        for sequence in self._running.values():
            if left == 0:
                break
            if sequence.is_prefilled:
                continue
            start, source = self._beginning(sequence)
            if not sequence.has_begun and any(self._shares(sequence.prompt, one) > start for one in begun):
                continue  # it copies from that one afterwards
            num_tokens = min(left, len(sequence.prompt) - start)
            chunk = self._chunk(sequence, start, source, num_tokens, padded_to=num_tokens, attention_length=length)
            prefills.append(chunk)
            begun.append(sequence.prompt)
            left -= num_tokens
        if not prefills:
            return None
        decode = self.next_decode()
        num_tokens = sum(len(one.tokens) for one in prefills) + (0 if decode is None else len(decode.rows))
        padded_to = smallest_fit(num_tokens, self._buckets.shared)
        return Shared(prefills=tuple(prefills), decode=decode, padded_to=padded_to, attention_length=length)

    def _shared_budget(self) -> int:
        """Prompt tokens of the next shared pass."""
        if self._is_decoding:
            return self._limits.chunk_tokens
        largest = self._buckets.shared[-1] - self._limits.slots
        waiting = sum(len(one.prompt) - one.num_cached for one in self._running.values() if not one.is_prefilled)
        return largest if waiting >= largest or not self._buckets.computes_padding else self._limits.chunk_tokens

    def _shares(self, prompt: Tokens, other: Tokens) -> int:
        return common_beginning(other, prompt, granularity=self._limits.reuse_granularity)

    def _beginning(self, sequence: Running) -> tuple[int, Prefix | None]:
        """Where the prompt goes on, and what is copied first."""
        start, source = sequence.num_cached, None
        if not sequence.has_begun:
            # Only now: what came before it, a choice of the same prompt perhaps, is computed by this time.
            source = self._slots.longest(sequence.prompt, beyond=Prefix(slot=sequence.slot, num_tokens=start))
            start = start if source is None else source.num_tokens
        return start, source

    def _chunk(
        self,
        sequence: Running,
        start: int,
        source: Prefix | None,
        num_tokens: int,
        *,
        padded_to: int,
        attention_length: int,
    ) -> Prefill:
        end = start + num_tokens
        return Prefill(
            request_id=sequence.request.request_id,
            slot=sequence.slot,
            tokens=sequence.request.prompt[start:end],
            start=start,
            is_last=end == len(sequence.request.prompt),
            padded_to=padded_to,
            attention_length=attention_length,
            is_first=not sequence.has_begun,
            copies_from=None if source is None else source.slot,
            copied_length=0 if source is None else smallest_fit(start, self._buckets.copies),
        )

    def prefilled(self, step: Prefill, *, tokens: Sequence[int]) -> Progress | None:
        """Take in a prefill's result; its one token where it was the last chunk."""
        sequence = self._running[step.request_id]
        sequence.has_begun = True
        sequence.num_cached = step.start + len(step.tokens)
        self._slots.hold(sequence.slot, sequence.prompt[: sequence.num_cached])
        return self._extended(sequence, tokens) if step.is_last else None

    def decoded(self, step: Decode, *, tokens: Sequence[Sequence[int]]) -> list[Progress]:
        """Take in a decode's result: each row's new tokens, in the order of `step.rows`."""
        progress = []
        for row, new in zip(step.rows, tokens, strict=True):
            sequence = self._running[row.request_id]
            sequence.num_cached += len(new)
            progress.append(self._extended(sequence, new))
        return progress

    def forget_prefixes(self) -> None:
        """Reuse nothing of what is cached now, not even of requests that run."""
        self._slots.forget()

    def why_unbalanced(self) -> str | None:
        """What is wrong with the slots, or None: each slot is free or held by exactly one request."""
        held = [sequence.slot for sequence in self._running.values()]
        free = self._slots.free
        if sorted((*held, *free)) != list(range(self._limits.slots)):
            return f"slots held {sorted(held)} and free {sorted(free)} are not 0..{self._limits.slots - 1}"
        for sequence in self._running.values():
            reach = len(sequence.prompt) + max(len(sequence.generated) - 1, 0)
            if sequence.num_cached > reach:
                return f"slot {sequence.slot} counts {sequence.num_cached} cached tokens of {reach}"
        return None

    def _num_steps(self, ready: Sequence[Running]) -> int:
        """Decode steps of the next call.

        One where a prompt waits for its next chunk, which should not wait for several tokens of everybody else. Where a
        request waits for a slot, no more than the request that ends first still needs: its slot changes hands at once.
        """
        if len(ready) < len(self._running):
            return 1
        needed = (one.tokens_left for one in ready)
        return min(self._limits.decode_steps, min(needed) if self._waiting else max(needed))

    def _reusable(self, sequence: Running) -> Tokens:
        """What of a request's cache later prompts may use."""
        if self._limits.is_deterministic or sequence.num_cached <= len(sequence.prompt):
            return sequence.prompt[: sequence.num_cached]
        whole = np.concatenate([sequence.prompt, np.asarray(sequence.generated, np.int32)])
        return whole[: sequence.num_cached]

    def _extended(self, sequence: Running, new: Sequence[int]) -> Progress:
        sequence.generated.extend(new)
        finish = None
        if new and new[-1] in sequence.request.sampling.stop_ids:
            finish = FinishReason.STOP
        elif sequence.tokens_left <= 0:
            finish = FinishReason.LENGTH
        if finish is not None:
            self.remove(sequence.request.request_id)
        return Progress(request_id=sequence.request.request_id, tokens=tuple(new), finish=finish)
