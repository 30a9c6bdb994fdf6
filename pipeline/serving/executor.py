"""The compiled model: prefill and decode executables over one donated cache.

Owns parameters, cache and executables of a replica. Knows nothing of requests, text or threads. The one decision:
executables are compiled ahead into a closed table and called from it, so a shape outside the table is an error at once
and nothing compiles while serving.

Shape suffixes: B batch, T chunk tokens, K decode steps, E stop ids.
"""

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.models.decoders.model import Cache, Decoder, empty_cache, fuse_projections
from pipeline.serving.buckets import Buckets
from pipeline.serving.request import MAX_STOP_IDS, Sampling
from pipeline.serving.sampling import SamplingRows, sample
from pipeline.serving.scheduler import Decode, Limits, Prefill

_LOG = logging.getLogger(__name__)
_NO_STOP = -1
_NO_TOKEN = -1
_COMPILE_THREADS = 2
Key = tuple[str, int, int]
"""Kind, batch or chunk, attention length."""
_SAMPLER: Key = ("sample", 1, 0)
"""Of prefill, apart from the model: inside it would double the compile time of every prefill bucket."""


class Rows(NamedTuple):
    """A decode call's rows; an unused row has budget 0."""

    slot_B: Any
    token_B: Any
    position_B: Any
    budget_B: Any
    stop_BE: Any
    sampling: SamplingRows


class ModelExecutor:
    """Runs scheduled steps on the device."""

    def __init__(self, model: Decoder, *, limits: Limits, buckets: Buckets, device: Any, dtype: str) -> None:
        """Fuse and place `model` (which is taken over) and allocate the cache."""
        self.buckets = buckets
        self._limits = limits
        self._steps = limits.decode_steps
        self._num_tokens = model.config.vocab_size
        self._device = device
        # On a CPU the head is kept as [D, V] beside a tied embedding: 23 instead of 26 ms a token at SmolLM2-135M.
        fused = fuse_projections(model, materialize_head=device.platform == "cpu")
        graph, state = nnx.split(fused)
        leaves, tree = jax.tree.flatten(state)
        self._leaves = jax.device_put([jnp.asarray(leaf, dtype) for leaf in leaves], device)
        self._rebuild: Callable[[Any], Decoder] = lambda leaves: nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        self._cache: Cache = jax.device_put(
            empty_cache(model.config, slots=limits.slots, positions=limits.context, dtype=dtype), device
        )
        self._table: dict[Key, Any] = {}

    @property
    def is_warm(self) -> bool:
        """True once every executable is compiled."""
        return len(self._table) == self.buckets.num_executables

    def warm_up(self, *, on_progress: Callable[[int, int], None] | None = None) -> float:
        """Compile every bucket, smallest first, and run each once; returns seconds.

        Raises:
            UserWarning: the cache could not be donated; every step would copy it.
        """
        started = time.monotonic()
        keys = list(self._keys())
        with warnings.catch_warnings(), ThreadPoolExecutor(max_workers=_COMPILE_THREADS) as pool:
            warnings.filterwarnings("error", message=".*donated.*")
            # Tracing holds the interpreter lock, compiling does not: the next is traced while one compiles.
            pending = [(key, pool.submit(self._lower(key).compile)) for key in keys]
            for done, (key, future) in enumerate(pending, start=1):
                self._table[key] = future.result()
                if on_progress is not None:
                    on_progress(done, len(keys))
        for key in keys:
            self._run_once(key)
        return time.monotonic() - started

    def prefill(self, step: Prefill, *, sampling: Sampling) -> int:
        """Run one chunk; the token sampled after it where it is the prompt's last chunk."""
        tokens = np.zeros((1, step.padded_to), np.int32)
        tokens[0, : len(step.tokens)] = step.tokens
        execute = self._table["prefill", step.padded_to, step.attention_length]
        placed = np.asarray([step.slot, step.start, len(step.tokens)], np.int32)
        logits_BV, self._cache = execute(self._leaves, self._cache, tokens, placed)
        if not step.is_last:
            return _NO_TOKEN
        position = np.asarray([step.start + len(step.tokens)], np.int32)
        token_B = self._table[_SAMPLER](logits_BV, _sampling_rows([sampling], 1), position)
        return int(np.asarray(token_B)[0])  # indexing the device array would compile

    def decode(self, step: Decode, *, sampling: Sequence[Sampling]) -> list[list[int]]:
        """Run up to `step.steps` decode steps; each row's new tokens, which end with a stop token where one came."""
        rows = self._rows(step, sampling)
        execute = self._table["decode", step.padded_to, step.attention_length]
        tokens_BK, counts_B, self._cache = execute(self._leaves, self._cache, rows, np.int32(step.steps))
        # One transfer for the whole call; nothing but token ids leaves the device.
        tokens, counts = np.asarray(tokens_BK), np.asarray(counts_B)
        return [tokens[row, : counts[row]].tolist() for row in range(len(step.rows))]

    def _rows(self, step: Decode, sampling: Sequence[Sampling]) -> Rows:
        size = step.padded_to
        columns = np.zeros((4, size), np.int32)
        stop_BE = np.full((size, MAX_STOP_IDS), _NO_STOP, np.int32)
        for index, (row, how) in enumerate(zip(step.rows, sampling, strict=True)):
            columns[:, index] = row.slot, row.token, row.position, row.budget
            stop_BE[index, : len(how.stop_ids)] = how.stop_ids
        return Rows(columns[0], columns[1], columns[2], columns[3], stop_BE, _sampling_rows(sampling, size))

    def _keys(self) -> Iterator[Key]:
        buckets = self.buckets
        keys = [("prefill", chunk, length) for chunk in buckets.chunks for length in buckets.prefill_attention]
        keys += [("decode", batch, length) for batch in buckets.decode_batches for length in buckets.decode_attention]
        yield _SAMPLER
        yield from sorted(keys, key=lambda key: (key[2], key[1]))

    def _lower(self, key: Key) -> Any:
        kind, size, attention_length = key
        if key == _SAMPLER:
            logits = jax.ShapeDtypeStruct((1, self._num_tokens), jnp.float32)
            jitted = jax.jit(lambda logits_BV, rows, at_B: sample(logits_BV, rows=rows, positions_B=at_B))
            return jitted.lower(logits, _sampling_rows([], 1), np.zeros(1, np.int32))
        function = self._prefill_function if kind == "prefill" else self._decode_function
        jitted = jax.jit(lambda *given: function(*given, attention_length=attention_length), donate_argnums=1)
        return jitted.lower(self._leaves, self._cache, *self._example(kind, size))

    def _example(self, kind: str, size: int) -> tuple[Any, ...]:
        if kind == "prefill":
            return np.zeros((1, size), np.int32), np.zeros(3, np.int32)
        return self._rows(Decode(rows=(), steps=0, padded_to=size, attention_length=0), ()), np.int32(0)

    def _run_once(self, key: Key) -> None:
        if key == _SAMPLER:
            logits = np.zeros((1, self._num_tokens), np.float32)
            jax.block_until_ready(self._table[key](logits, _sampling_rows([], 1), np.zeros(1, np.int32)))
            return
        # The first call of an executable allocates; no request should wait for that. Nothing is written: the count of
        # valid tokens and all budgets are 0.
        *results, self._cache = self._table[key](self._leaves, self._cache, *self._example(key[0], key[1]))
        jax.block_until_ready(results)

    def _prefill_function(
        self, leaves: Any, cache: Cache, tokens_BT: Any, placed: Any, *, attention_length: int
    ) -> tuple[jax.Array, Cache]:
        slot, start, count = placed
        offsets_T = jnp.arange(tokens_BT.shape[1])
        positions_T = jnp.where(offsets_T < count, start + offsets_T, self._limits.context)
        return self._rebuild(leaves).extend(
            tokens_BT,
            cache=cache,
            positions_BT=positions_T[None],
            attention_length=attention_length,
            slots_B=slot[None],
            take_B=count[None] - 1,
        )

    def _decode_function(
        self, leaves: Any, cache: Cache, rows: Rows, num_steps: Any, *, attention_length: int
    ) -> tuple[jax.Array, jax.Array, Cache]:
        model = self._rebuild(leaves)
        num_rows = rows.token_B.shape[0]

        def unfinished(carry: Any) -> jax.Array:
            step, is_active_B, *_ = carry
            return (step < num_steps) & jnp.any(is_active_B)

        def one_step(carry: Any) -> Any:
            step, is_active_B, token_B, count_B, tokens_BK, cache = carry
            position_B = jnp.where(is_active_B, rows.position_B + step, self._limits.context)
            logits_BV, cache = model.extend(
                token_B[:, None],
                cache=cache,
                positions_BT=position_B[:, None],
                attention_length=attention_length,
                slots_B=rows.slot_B,
            )
            next_B = sample(logits_BV, rows=rows.sampling, positions_B=position_B + 1)
            tokens_BK = tokens_BK.at[:, step].set(next_B)
            count_B = count_B + is_active_B
            is_active_B &= (count_B < rows.budget_B) & jnp.all(next_B[:, None] != rows.stop_BE, axis=1)
            return step + 1, is_active_B, next_B, count_B, tokens_BK, cache

        start = (
            jnp.int32(0),
            rows.budget_B > 0,
            rows.token_B,
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros((num_rows, self._steps), jnp.int32),
            cache,
        )
        _, _, _, count_B, tokens_BK, cache = jax.lax.while_loop(unfinished, one_step, start)
        return tokens_BK, count_B, cache


def _sampling_rows(sampling: Sequence[Sampling], size: int) -> SamplingRows:
    temperature, top_p = np.zeros(size, np.float32), np.ones(size, np.float32)
    top_k, seed = np.zeros(size, np.int32), np.zeros(size, np.uint32)
    for index, how in enumerate(sampling):
        temperature[index], top_k[index], top_p[index] = how.temperature, how.top_k, how.top_p
        seed[index] = how.seed & 0xFFFFFFFF
    return SamplingRows(temperature_B=temperature, top_k_B=top_k, top_p_B=top_p, seed_B=seed)
