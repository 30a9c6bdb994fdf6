"""Requests that arrive by themselves, and what their clients see.

Owns the schedule and the client. The schedule is pure; the client knows OpenAI's streamed completions and nothing of
who answers. The one decision: the loop is open: a request is sent at its time whether or not the ones before it are
answered, because a client that waits for answers hides how a slow server queues.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import StageError

_TIMEOUT_SECONDS = 400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request of the schedule."""

    at_seconds: float
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What one client saw; seconds count from when its request was due."""

    first_seconds: float
    end_seconds: float
    num_tokens: int


def poisson_arrivals(
    num: int, *, per_second: float, prompt_tokens: tuple[int, int], new_tokens: tuple[int, int], seed: int
) -> list[Arrival]:
    """`num` requests whose gaps are exponential, with lengths drawn evenly between the ends of the ranges."""
    draw = random.Random(seed)
    arrivals, at = [], 0.0
    for _ in range(num):
        at += draw.expovariate(per_second)
        prompt = random_prompt(draw.randint(*prompt_tokens), draw=draw)
        arrivals.append(Arrival(at_seconds=at, prompt=prompt, max_tokens=draw.randint(*new_tokens)))
    return arrivals


def random_prompt(length: int, *, draw: random.Random) -> tuple[int, ...]:
    """Token ids that no two prompts share from their first one on, so that no cache of prefixes helps anybody."""
    return tuple(draw.randrange(1000, 40_000) for _ in range(length))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def summarize(seen: Sequence[Seen], *, arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Tokens per second from the first arrival to the last answer, and the 99th percentile to the first token."""
    ends = [item.at_seconds + what.end_seconds for item, what in zip(arrivals, seen, strict=True)]
    return {
        "tokens_per_second": sum(what.num_tokens for what in seen) / (max(ends) - arrivals[0].at_seconds),
        "p99_first_seconds": percentile([what.first_seconds for what in seen], 99),
    }


def replay(arrivals: Sequence[Arrival], *, port: int, model: str) -> list[Seen]:
    """Send every request at its time and read its answer.

    Raises:
        StageError: one was refused or broke off.
    """
    return asyncio.run(_replay(arrivals, port=port, model=model))


async def _replay(arrivals: Sequence[Arrival], *, port: int, model: str) -> list[Seen]:
    start = time.perf_counter()
    tasks = [asyncio.create_task(_send(item, start=start, port=port, model=model)) for item in arrivals]
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            return list(await asyncio.gather(*tasks))
    except TimeoutError as error:
        num_done = sum(task.done() for task in tasks)
        raise StageError(
            f"{num_done} of {len(arrivals)} requests were answered within {_TIMEOUT_SECONDS:g} s"
        ) from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send(item: Arrival, *, start: float, port: int, model: str) -> Seen:
    due = start + item.at_seconds
    await asyncio.sleep(due - time.perf_counter())
    body = json.dumps(
        {
            "model": model,
            "prompt": item.prompt,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        return await _read(reader, due=due)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, *, due: float) -> Seen:
    """Events of the answer; the lines between them are the sizes of HTTP's chunks."""
    first, num_tokens = 0.0, 0
    status = await reader.readline()
    if b" 200 " not in status:
        raise StageError(f"a request was answered with {status.decode(errors='replace').strip() or 'nothing'}")
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        now = time.perf_counter()
        if line.startswith(b"data: [DONE]"):
            return Seen(first_seconds=first, end_seconds=now - due, num_tokens=num_tokens)
        event = json.loads(line.removeprefix(b"data: "))
        first = first or now - due
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    raise StageError("an answer broke off before its end")
