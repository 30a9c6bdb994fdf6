"""Our side of `pipeline bench serve`: a replica as a deployment makes it, with its defaults.

Owns what is asked of the replica and how long it takes. Runs in a process of its own, without torch. The one decision:
everything goes through the engine that serves, its scheduler and detokenizer included, and never straight to the
executables.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.diagnostics.bench_serve_listening import listen
from pipeline.errors import StageError
from pipeline.models.config_file import read_config
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.description import ModelDescription
from pipeline.models.family import FamilyModel
from pipeline.models.packed.calls import support
from pipeline.models.packed.product import pack, packed_product
from pipeline.models.registry import describe
from pipeline.serving.accelerator.replica_environment import STATE
from pipeline.serving.engine.batch_request import BatchAnswer, BatchRequest, Row
from pipeline.serving.engine.engine import Engine
from pipeline.serving.engine.micro_batcher import MicroBatcher
from pipeline.serving.engine.request import Chunk, FinishReason, Request, Sampling
from pipeline.serving.engine.tokenizer_file import read_tokenizer
from pipeline.serving.hosting.replica import Replica
from pipeline.serving.replica_settings import ReplicaConfig, ReplicaSettings
from pipeline.stages.parameters import DeployServeParameters

CONTEXT = 1024
NAME = "bench"
_MATRIX = (4096, 32_768)
"""512 MiB: as much as the weights of SmolLM2-135M and far more than any cache holds."""
_MATRIX_READS = 8
Answers = Mapping[str, Callable[..., Any]]


def settings(
    directory: Path, *, compilation_cache: str | None = None, context: int | None = CONTEXT
) -> ReplicaSettings:
    """What a deployment with the default parameters tells its replica."""
    fields = DeployServeParameters.model_fields
    return ReplicaSettings(
        name=NAME,
        model_path=str(directory),
        digest="",
        version="1",
        deployment_id=NAME,
        slots=fields["slots"].default,
        context=context,
        prefill_chunk_tokens=fields["prefill_chunk_tokens"].default,
        decode_steps=fields["decode_steps"].default,
        max_batch_rows=fields["max_batch_rows"].default,
        batch_wait_seconds=fields["batch_wait_seconds"].default,
        compilation_cache=compilation_cache,
    )


def answers(directory: Path) -> Answers:
    """Of a decoder."""
    replica = _replica(settings(directory, context=CONTEXT))
    engine = replica.models[NAME].served.engine
    assert isinstance(engine, Engine)

    def generate(prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, float]:
        return _generate(engine, prompts, num_tokens=num_tokens)

    return {
        "generate": generate,
        "bandwidth": _gigabytes_per_second,
        "bytes_a_token": lambda: bytes_a_token(describe(directory)),
        "listen": lambda: listen(replica.app),
    }


def embedding_answers(directory: Path) -> Answers:
    """Of a text encoder: `embed` takes texts and gives seconds and the sum of what it made."""
    batcher = _replica(settings(directory, context=None)).models[NAME].served.engine
    assert isinstance(batcher, MicroBatcher)
    tokenizer = read_tokenizer(directory, num_tokens=int(read_config(directory)["vocab_size"]))

    def embed(texts: Sequence[str]) -> dict[str, Any]:
        started = time.perf_counter()
        rows = [_row(np.asarray(tokenizer.encode(text).ids, np.int32)) for text in texts]
        made = np.stack([row["embedding"] for row in _ask(batcher, rows)])
        return {"seconds": time.perf_counter() - started, "first": made[0, :4].tolist()}

    return {"embed": embed}


def start_answers(directory: Path) -> Answers:
    """Of a process that only starts: `start` comes back when the replica is ready."""

    def start(cache: str) -> dict[str, float]:
        os.environ[STATE] = cache  # where a deployment's processes leave what they have measured
        served = _replica(settings(directory, context=CONTEXT, compilation_cache=cache)).models[NAME].served
        return {"warm_up_seconds": served.engine.warm_up_seconds}

    return {"start": start}


def product_answers(directory: Path) -> Answers:
    """Of the weights of every layer of a decoder: `multiply` takes rows and gives seconds of all products of a step."""
    description = describe(directory)
    assert isinstance(description, FamilyModel)
    config = description.parsed
    assert isinstance(config, DecoderConfig)
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    shapes = (
        (config.hidden_size, heads * config.head_dim),
        (config.num_attention_heads * config.head_dim, config.hidden_size),
        (config.hidden_size, 2 * config.intermediate_size),
        (config.intermediate_size, config.hidden_size),
    )
    key = jax.random.key(0)
    kernels = [[jax.random.normal(key, shape) for shape in shapes] for _ in range(config.num_hidden_layers)]
    weights: Mapping[str, Any] = {"xla": kernels, "packed": jax.tree.map(pack, kernels)}

    def one_step(layers: Any, xs: Any, is_packed: bool) -> list[jax.Array]:
        def multiply(x: jax.Array, kernel: jax.Array, num_out: int) -> jax.Array:
            return packed_product(x, kernel, num_out=num_out) if is_packed else x @ kernel

        return [
            multiply(xs[shape[0]], kernel, shape[1])
            for layer in layers
            for kernel, shape in zip(layer, shapes, strict=True)
        ]

    jitted = jax.jit(one_step, static_argnums=2)

    def multiply(rows: int, how: str) -> dict[str, float]:
        xs = {shape[0]: jnp.ones((rows, shape[0])) for shape in shapes}
        jax.block_until_ready(jitted(weights[how], xs, how == "packed"))
        started = time.perf_counter()
        jax.block_until_ready(jitted(weights[how], xs, how == "packed"))
        return {"seconds": time.perf_counter() - started}

    return {"multiply": multiply}


def _replica(one: ReplicaSettings) -> Replica:
    replica = Replica()
    replica.reconfigure(ReplicaConfig(models=(one,)).as_json())
    return replica


def bytes_a_token(description: ModelDescription) -> int:
    """Bytes of float32 weights that one decode step must read.

    All of them, but of an embedding that is no output head only one row.
    """
    assert isinstance(description, FamilyModel)
    config = description.parsed
    assert isinstance(config, DecoderConfig)
    numbers = config.num_parameters
    if not config.tie_word_embeddings:
        numbers -= config.vocab_size * config.hidden_size
    return 4 * int(numbers)


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], *, num_tokens: int) -> dict[str, float]:
    """Greedy continuations of all prompts at once."""
    run = uuid.uuid4().hex
    times: list[tuple[float, Chunk]] = []
    is_done = threading.Event()
    num_open = len(prompts)

    def sink(chunks: Sequence[Chunk]) -> None:
        nonlocal num_open
        now = time.perf_counter()
        times.extend((now, chunk) for chunk in chunks)
        num_open -= sum(chunk.finish is not None for chunk in chunks)
        if num_open == 0:
            is_done.set()

    sampling = Sampling(max_tokens=num_tokens, temperature=0.0)
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.submit(Request(request_id=f"{run}-{index}", prompt=tuple(prompt), sampling=sampling), sink=sink)
    if not is_done.wait(timeout=300):
        raise StageError(f"{num_open} of {len(prompts)} requests did not end")
    failed = [chunk.error for _, chunk in times if chunk.finish in (FinishReason.ERROR, FinishReason.ABORT)]
    if failed:
        raise StageError(f"a request failed: {failed[0]}")
    total = sum(chunk.num_tokens for _, chunk in times)
    first, last = times[0][0], times[-1][0]
    return {
        "first_seconds": first - started,
        "tokens_per_second": total / (last - started),
        "decode_tokens_per_second": (total - times[0][1].num_tokens) / max(last - first, 1e-9),
    }


def _row(ids: np.ndarray[Any, Any]) -> Row:
    return Row(inputs={"input_ids": ids, "attention_mask": np.ones_like(ids)}, length=len(ids))


def _ask(batcher: MicroBatcher, rows: Sequence[Row]) -> Sequence[Mapping[str, Any]]:
    is_done = threading.Event()
    taken: list[BatchAnswer] = []

    def sink(answer: BatchAnswer) -> None:
        taken.append(answer)
        is_done.set()

    batcher.submit(BatchRequest(request_id=uuid.uuid4().hex, rows=rows), sink=sink)
    if not is_done.wait(timeout=120):
        raise StageError("the batch did not end")
    if taken[0].error:
        raise StageError(taken[0].error)
    return taken[0].rows


def _gigabytes_per_second() -> float:
    """The fastest of several products of one row with a matrix that no cache holds: what decoding could read."""
    row = jnp.ones((1, _MATRIX[0]), jnp.float32)
    matrix = jnp.ones(_MATRIX, jnp.float32)
    best = _read_seconds(jnp.matmul, row, matrix)
    if support().product is not None:
        best = min(best, _read_seconds(partial(packed_product, num_out=_MATRIX[1]), row, pack(matrix)))
    return matrix.nbytes / 1e9 / best


def _read_seconds(multiply: Callable[[jax.Array, jax.Array], jax.Array], row: jax.Array, matrix: jax.Array) -> float:
    product = jax.jit(multiply)
    product(row, matrix).block_until_ready()
    seconds = []
    for _ in range(_MATRIX_READS):
        started = time.perf_counter()
        product(row, matrix).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
