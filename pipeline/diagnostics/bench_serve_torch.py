"""The torch side of `pipeline bench serve`: transformers as its documentation uses it, float32, two threads.

Owns padded `generate`, continuous batching (`generate_batch`, and its manager behind the same HTTP server as ours), and
embeddings as sentence-transformers makes them. Runs in a process of its own, without jax. The one decision: what serves
a batch best is left to transformers; only the size of its cache is given, because by default it takes 90 % of the
memory that is free.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from pipeline.diagnostics.bench_serve_embedder import make_embedder
from pipeline.diagnostics.bench_serve_listening import listen
from pipeline.diagnostics.bench_serve_side import THREADS

_CACHE = {"num_blocks": 64, "max_batch_tokens": 256}
"""64 blocks of 256 tokens, and a step of at most 256: at least as fast as what transformers chooses, in 0.8 GB."""
Answers = Mapping[str, Callable[..., Any]]


class _Clock(StoppingCriteria):
    """Never stops anything; notes when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def answers(directory: Path) -> Answers:
    """Of a decoder."""
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def generate(prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, float]:
        return _generate(model, prompts, config=config, num_tokens=num_tokens)

    def generate_batch(prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        made = model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=GenerationConfig(**config.to_diff_dict() | {"max_new_tokens": num_tokens}),
            continuous_batching_config=ContinuousBatchingConfig(**_CACHE),
            progress_bar=False,
        )
        total = sum(len(output.generated_tokens) for output in made.values())
        return {"tokens_per_second": total / (time.perf_counter() - started)}

    return {"generate": generate, "generate_batch": generate_batch, "listen": lambda: _listen(model, directory)}


def embedding_answers(directory: Path) -> Answers:
    """Of a text encoder."""
    torch.set_num_threads(THREADS)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()

    def forward(arrays: Mapping[str, Any]) -> Any:
        with torch.inference_mode():
            hidden = model(**{name: torch.from_numpy(array) for name, array in arrays.items()}).last_hidden_state
            weights = torch.from_numpy(arrays["attention_mask"])[..., None].to(hidden.dtype)
            mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean, dim=1).numpy()

    return {"embed": make_embedder(directory, forward=forward)}


def _generate(
    model: Any, prompts: Sequence[Sequence[int]], *, config: GenerationConfig, num_tokens: int
) -> dict[str, float]:
    """Padded on the left, as transformers asks for."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    clock = _Clock()
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=mask,
            generation_config=GenerationConfig(**config.to_diff_dict() | {"max_new_tokens": num_tokens}),
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    first, last = clock.times[0], clock.times[-1]
    return {
        "first_seconds": first - started,
        "tokens_per_second": len(prompts) * num_tokens / (last - started),
        "decode_tokens_per_second": len(prompts) * (num_tokens - 1) / max(last - first, 1e-9),
    }


def _listen(model: Any, directory: Path) -> int:
    """Continuous batching behind `/v1/completions`, streamed."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    stop = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("eos_token_id") or -1
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=stop, pad_token_id=0, max_new_tokens=64),
        continuous_batching_config=ContinuousBatchingConfig(**_CACHE),
    )
    manager.start()

    async def events(body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        name, results = uuid.uuid4().hex, asyncio.Queue[Any]()
        manager.register_result_handler(name, results.put_nowait)
        manager.add_request(body["prompt"], request_id=name, max_new_tokens=body["max_tokens"], streaming=True)
        num_sent, is_finished = 0, False
        while not is_finished:
            result = await results.get()
            is_finished = result.is_finished()
            text = tokenizer.decode(result.generated_tokens[num_sent:])
            num_sent = len(result.generated_tokens)
            yield _event({"choices": [{"index": 0, "text": text}]})
        yield _event({"choices": [], "usage": {"completion_tokens": num_sent}})
        yield b"data: [DONE]\n\n"

    async def completions(request: Request) -> Response:
        return StreamingResponse(events(await request.json()), media_type="text/event-stream")

    return listen(Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])]))


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
