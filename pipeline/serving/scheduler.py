"""Which request runs next, in which slot, with how many tokens.

Owns slots and queue. Pure: values in, values out, the time is passed in; knows nothing of jax, threads or text. The one
decision: decode goes first and one prefill chunk follows it, so the time between two tokens of a running request is
bounded by one chunk, however long the prompts that arrive.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.serving.buckets import Buckets, smallest_fit
from pipeline.serving.request import FinishReason, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one replica holds."""

    slots: int
    context: int
    """Tokens of prompt plus completion."""
    chunk_tokens: int
    decode_steps: int
    max_waiting: int = 1024


@dataclass(kw_only=True, slots=True)
class Running:
    """A request in a slot or in the queue."""

    request: Request
    arrived_at: float
    slot: int = -1
    num_cached: int = 0
    """Tokens whose keys and values are in the cache."""
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
    """Run `tokens` of one prompt from position `start` in `slot`; where `is_last`, the sampled token counts."""

    request_id: str
    slot: int
    tokens: tuple[int, ...]
    start: int
    is_last: bool
    padded_to: int
    attention_length: int


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
        self._free = list(range(limits.slots))

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
        self._waiting.append(Running(request=request, arrived_at=now))

    def request(self, request_id: str) -> Request:
        """A running request."""
        return self._running[request_id].request

    def remove(self, request_id: str) -> bool:
        """Forget a request wherever it is and free its slot; False where it is unknown."""
        sequence = self._running.pop(request_id, None)
        if sequence is not None:
            self._free.append(sequence.slot)
            return True
        for waiting in self._waiting:
            if waiting.request.request_id == request_id:
                self._waiting.remove(waiting)
                return True
        return False

    def admit(self, *, now: float) -> list[tuple[str, float]]:
        """Give free slots to the longest waiting; returns (request, seconds it waited)."""
        admitted = []
        while self._waiting and self._free:
            sequence = self._waiting.popleft()
            sequence.slot = self._free.pop()
            self._running[sequence.request.request_id] = sequence
            admitted.append((sequence.request.request_id, now - sequence.arrived_at))
        return admitted

    def next_decode(self) -> Decode | None:
        """The decode call of this step, or None where nothing decodes."""
        ready = [sequence for sequence in self._running.values() if sequence.is_prefilled]
        if not ready:
            return None
        is_prefill_pending = len(ready) < len(self._running)
        # A prompt that waits for its next chunk should not wait for several tokens of everybody else.
        longest = max(sequence.tokens_left for sequence in ready)
        steps = 1 if is_prefill_pending else min(self._limits.decode_steps, longest)
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

    def next_prefill(self) -> Prefill | None:
        """The prefill chunk of this step (of the request that came first), or None."""
        for sequence in self._running.values():
            if sequence.is_prefilled:
                continue
            start = sequence.num_cached
            tokens = sequence.request.prompt[start : start + self._limits.chunk_tokens]
            end = start + len(tokens)
            return Prefill(
                request_id=sequence.request.request_id,
                slot=sequence.slot,
                tokens=tokens,
                start=start,
                is_last=end == len(sequence.request.prompt),
                padded_to=smallest_fit(len(tokens), self._buckets.chunks),
                attention_length=smallest_fit(end, self._buckets.prefill_attention),
            )
        return None

    def prefilled(self, step: Prefill, *, token: int) -> Progress | None:
        """Take in a prefill's result; the first token where it was the last chunk."""
        sequence = self._running[step.request_id]
        sequence.num_cached += len(step.tokens)
        return self._extended(sequence, [token]) if step.is_last else None

    def decoded(self, step: Decode, *, tokens: Sequence[Sequence[int]]) -> list[Progress]:
        """Take in a decode's result: each row's new tokens, in the order of `step.rows`."""
        progress = []
        for row, new in zip(step.rows, tokens, strict=True):
            sequence = self._running[row.request_id]
            sequence.num_cached += len(new)
            progress.append(self._extended(sequence, new))
        return progress

    def why_unbalanced(self) -> str | None:
        """What is wrong with the slots, or None: each slot is free or held by exactly one request."""
        held = [sequence.slot for sequence in self._running.values()]
        if sorted((*held, *self._free)) != list(range(self._limits.slots)):
            return f"slots held {sorted(held)} and free {sorted(self._free)} are not 0..{self._limits.slots - 1}"
        return None

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
