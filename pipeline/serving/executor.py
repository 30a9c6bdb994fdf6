"""The compiled model: prefill and decode executables over one donated cache.

Owns parameters, cache and executables of a replica. Knows nothing of requests, text or threads. The one decision:
executables are compiled ahead into a closed table and called from it, so a shape outside the table is an error at once
and nothing compiles while serving.

Shape suffixes: B batch, K decode steps, V vocabulary.
"""

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from pipeline.models.decoders.model import Cache, Decoder
from pipeline.serving.buckets import Buckets
from pipeline.serving.mesh import ServingMesh
from pipeline.serving.request import Sampling
from pipeline.serving.scheduler import Decode, Limits, Prefill
from pipeline.serving.served_parameters import ServedParameters
from pipeline.serving.step_arguments import (
    decode_arguments,
    idle_decode,
    idle_prefill,
    prefill_arguments,
    sampler_arguments,
)
from pipeline.serving.step_functions import StepFunctions, first_token

_LOG = logging.getLogger(__name__)
_NO_TOKEN = -1
_COMPILE_THREADS = 2
Key = tuple[str, int, int]
"""Kind, batch or chunk, attention length."""
_SAMPLER: Key = ("sample", 1, 0)
"""Of prefill, apart from the model: inside it would double the compile time of every prefill bucket."""


class ModelExecutor:
    """Runs scheduled steps on the device."""

    def __init__(self, model: Decoder, *, limits: Limits, buckets: Buckets, mesh: ServingMesh, dtype: str) -> None:
        """Fuse and place `model` (which is taken over) and allocate the cache."""
        self.limits = limits
        self.buckets = buckets
        self._num_tokens = model.config.vocab_size
        self._mesh = mesh
        self._parameters = ServedParameters(model, mesh=mesh, dtype=dtype)
        self._functions = StepFunctions(
            rebuild=self._parameters.rebuild,
            whole=mesh.on_every_device,
            context=limits.context,
            decode_steps=limits.decode_steps,
        )
        self._cache: Cache = mesh.empty_cache(model.config, slots=limits.slots, positions=limits.context, dtype=dtype)
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
        execute = self._table["prefill", step.padded_to, step.attention_length]
        logits_BV, self._cache = execute(self._parameters.arrays, self._cache, *prefill_arguments(step))
        if not step.is_last:
            return _NO_TOKEN
        position = step.start + len(step.tokens)
        token_B = self._table[_SAMPLER](logits_BV, *sampler_arguments([sampling], position=position))
        return int(np.asarray(token_B)[0])  # indexing the device array would compile

    def decode(self, step: Decode, *, sampling: Sequence[Sampling]) -> list[list[int]]:
        """Run up to `step.steps` decode steps; each row's new tokens, which end with a stop token where one came."""
        execute = self._table["decode", step.padded_to, step.attention_length]
        arguments = decode_arguments(step, sampling=sampling)
        tokens_BK, counts_B, self._cache = execute(self._parameters.arrays, self._cache, *arguments)
        # One transfer for the whole call; nothing but token ids leaves the device.
        tokens, counts = np.asarray(tokens_BK), np.asarray(counts_B)
        return [tokens[row, : counts[row]].tolist() for row in range(len(step.rows))]

    def leaves_of(self, model: Decoder) -> dict[str, Any]:
        """What `place` takes, from a model of the same description (which is taken over); compiles."""
        return self._parameters.leaves_of(model)

    def place(self, leaves: Mapping[str, Any]) -> list[jax.Array]:
        """New leaves on the device, beside those in use. Compiles nothing; for any thread.

        Raises:
            ParameterError: a name, shape or dtype differs from what was compiled.
        """
        return self._parameters.placed(leaves)

    def exchange(self, placed: list[jax.Array]) -> list[jax.Array]:
        """Run with these arrays (of `place`) from the next step on; returns those in use until now."""
        before, self._parameters.arrays = self._parameters.arrays, placed
        return before

    def on_host(self, arrays: Sequence[jax.Array]) -> dict[str, NDArray[Any]]:
        """Arrays that `exchange` returned, as `place` takes them, in the host's memory."""
        return self._parameters.on_host(arrays)

    def _keys(self) -> Iterator[Key]:
        buckets = self.buckets
        keys = [("prefill", chunk, length) for chunk in buckets.chunks for length in buckets.prefill_attention]
        keys += [("decode", batch, length) for batch in buckets.decode_batches for length in buckets.decode_attention]
        yield _SAMPLER
        yield from sorted(keys, key=lambda key: (key[2], key[1]))

    def _lower(self, key: Key) -> Any:
        kind, size, attention_length = key
        if key == _SAMPLER:
            logits = jax.ShapeDtypeStruct((1, self._num_tokens), jnp.float32, sharding=self._mesh.whole)
            return jax.jit(first_token).lower(logits, *sampler_arguments([], position=0))
        function = getattr(self._functions, kind)
        settled = self._mesh.settled(lambda *given: function(*given, attention_length=attention_length))
        jitted = jax.jit(settled, donate_argnums=1)
        return jitted.lower(self._parameters.arrays, self._cache, *_idle(kind, size))

    def _run_once(self, key: Key) -> None:
        # The first call of an executable allocates; no request should wait for that.
        if key == _SAMPLER:
            logits = np.zeros((1, self._num_tokens), np.float32)
            jax.block_until_ready(self._table[key](logits, *sampler_arguments([], position=0)))
            return
        kind, size, _ = key
        *results, self._cache = self._table[key](self._parameters.arrays, self._cache, *_idle(kind, size))
        jax.block_until_ready(results)


def _idle(kind: str, size: int) -> tuple[Any, ...]:
    return idle_prefill(size) if kind == "prefill" else idle_decode(size)
