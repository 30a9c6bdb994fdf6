"""The compiled model: executables of prefill, decode and passes of both, over one donated cache.

Owns parameters, cache and executables of a replica. Knows nothing of requests, text or threads. The one decision:
executables are compiled ahead into a closed table and called from it, so a shape outside the table is an error at once
and nothing compiles while serving.

Shape suffixes: B batch, K decode steps, V vocabulary.
"""

import functools
import threading
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
from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.engine.buckets import Buckets, smallest_fit
from pipeline.serving.engine.request import MAX_LOGIT_BIAS, Sampling
from pipeline.serving.engine.scheduler import Decode, Limits, Prefill, Shared
from pipeline.serving.engine.served_parameters import ServedParameters
from pipeline.serving.engine.step_arguments import (
    choice_arguments,
    copy_arguments,
    decode_arguments,
    idle_choice,
    idle_decode,
    idle_prefill,
    idle_shared,
    places,
    prefill_arguments,
    shared_arguments,
)
from pipeline.serving.engine.step_functions import StepFunctions, copied_prefix
from pipeline.serving.engine.temporaries import temporary_bytes
from pipeline.serving.engine.token_choice import choose
from pipeline.serving.engine.token_rules import Chosen, Ranks, TokenRules

_COMPILE_THREADS = 2
_LOWERING = threading.Lock()
Key = tuple[str, int, int]
"""Kind, batch or chunk or tokens, attention length. The kind `copy` has the length of what is copied. The kind `choose`
sees logits alone, and has the number of adjusted tokens; it also takes the token after a prompt: inside prefill that
would double the compile time of each of its buckets."""
_NO_COPY = (np.asarray(0, np.int32), np.asarray(0, np.int32))
_GREEDY = Sampling(max_tokens=1, temperature=0.0)


class ModelExecutor:
    """Runs scheduled steps on the device."""

    def __init__(self, model: Decoder, *, limits: Limits, buckets: Buckets, mesh: ServingMesh, dtype: str) -> None:
        """Fuse and place `model` (which is taken over) and allocate the cache."""
        self.limits = limits
        self.buckets = buckets
        self._num_tokens = model.config.vocab_size
        self._adjusted = (*buckets.adjusted, min(limits.context + MAX_LOGIT_BIAS, self._num_tokens))
        self._mesh = mesh
        self._parameters = ServedParameters(model, mesh=mesh, dtype=dtype)
        self._functions = StepFunctions(
            rebuild=self._parameters.rebuild,
            whole=mesh.on_every_device,
            context=limits.context,
            decode_steps=limits.decode_steps,
        )
        self._cache: Cache = mesh.empty_cache(model.config, slots=limits.slots, positions=limits.context, dtype=dtype)
        self._logits_BV: jax.Array | None = None
        self._table: dict[Key, Any] = {}
        self.before_first_run: Callable[[], None] = _no_wait
        """Is called when everything is compiled, before anything is run."""
        self.before_run: Callable[[Key, tuple[Any, ...]], None] = _unheard
        """Is told of every call of an executable after warm-up, with its host arrays, before it is made."""

    @property
    def is_warm(self) -> bool:
        """True once every executable is compiled."""
        return len(self._table) == self.buckets.num_executables

    @property
    def temporary_bytes(self) -> int:
        """The most that one of the executables takes beside parameters and cache."""
        return max((temporary_bytes(compiled) for compiled in self._table.values()), default=0)

    def warm_up(self, *, on_progress: Callable[[int, int], None] | None = None) -> float:
        """Compile every bucket, smallest first, and run each once; returns seconds.

        Raises:
            UserWarning: the cache could not be donated; every step would copy it.
        """
        started = time.monotonic()
        keys = list(self._keys())
        with ThreadPoolExecutor(max_workers=_COMPILE_THREADS) as pool:
            # Tracing holds the interpreter lock, compiling does not: the next is traced while one compiles.
            pending = [(key, pool.submit(self._lowered(key).compile)) for key in keys]
            for done, (key, future) in enumerate(pending, start=1):
                self._table[key] = future.result()
                if on_progress is not None:
                    on_progress(done, len(keys))
        self.before_first_run()
        for key in keys:
            self._run_once(key)
        return time.monotonic() - started

    def _lowered(self, key: Key) -> Any:
        with _LOWERING, warnings.catch_warnings():  # filters are the whole process's, and engines warm up side by side
            warnings.filterwarnings("error", message=".*donated.*")
            return self._lower(key)

    def prefill(self, step: Prefill, *, rules: TokenRules) -> Chosen:
        """Run one chunk; the token chosen after it where it is the prompt's last chunk, else none."""
        self._copy_prefix(step)
        self.run(("prefill", step.padded_to, step.attention_length), *prefill_arguments(step))
        if not step.is_last:
            return Chosen([])
        return self._choose([rules], positions=[step.start + len(step.tokens)], places=[0], size=1)[0]

    def shared(self, step: Shared, *, rules: Sequence[TokenRules]) -> list[Chosen]:
        """Run one pass; the tokens of the requests of `step.asking`, whose rules are given in that order."""
        for one in step.prefills:
            self._copy_prefix(one)
        key = "shared", step.padded_to, step.attention_length
        self.run(key, *shared_arguments(step, slots=self.limits.slots))
        if not rules:
            return []
        positions = [row.position + 1 for row in step.rows]
        positions += [one.start + len(one.tokens) for one in step.ending]
        return self._choose(rules, positions=positions, places=range(len(rules)), size=self.limits.slots)

    def _copy_prefix(self, step: Prefill) -> None:
        if step.copies_from is not None:
            self.run(("copy", 1, step.copied_length), *copy_arguments(step))

    def decode(self, step: Decode, *, rules: Sequence[TokenRules]) -> list[Chosen]:
        """Run up to `step.steps` decode steps; each row's new tokens, which end with a stop token where one came.

        One step alone is run where a row has more rules than the loop on the device knows: a grammar follows every
        token on the host.
        """
        # Two executables may round a sum differently: where that matters, one chooses every token.
        is_plain = not self.limits.is_deterministic and all(rule.is_plain for rule in rules)
        sampling = [rule.sampling if is_plain else _GREEDY for rule in rules]
        at = places(step, slots=self.limits.slots)
        rows, num_steps = decode_arguments(step, sampling=sampling, places=at)
        if not is_plain:
            num_steps = np.minimum(num_steps, 1)
        key = "decode", step.padded_to, step.attention_length
        tokens_BK, counts_B, _ = self.run(key, rows, num_steps)
        if not is_plain:
            positions = [row.position + 1 for row in step.rows]
            return self._choose(rules, positions=positions, places=at, size=step.padded_to)
        # One transfer for the whole call; nothing but token ids leaves the device.
        tokens, counts = np.asarray(tokens_BK), np.asarray(counts_B)
        return [Chosen(tokens[place, : counts[place]].tolist()) for place in at]

    def run(self, key: Key, *arguments: Any) -> list[jax.Array]:
        """Call one executable on host arrays; device arrays of what it gives beside the cache.

        This is the only way to the device after warm-up: whoever makes the same calls in the same order has the same
        cache and the same logits, which `choose` reads.

        Raises:
            KeyError: a shape outside the table.
        """
        self.before_run(key, arguments)
        return self._run(key, *arguments)

    def _run(self, key: Key, *arguments: Any) -> list[jax.Array]:
        execute = self._table[key]
        if key[0] == "choose":
            return list(execute(self._logits_BV, *arguments))
        parameters = () if key[0] == "copy" else (self._parameters.arrays,)
        *results, self._cache = execute(*parameters, self._cache, *arguments)
        if results:
            self._logits_BV = results[-1]
        return results

    def _choose(
        self, rules: Sequence[TokenRules], *, positions: Sequence[int], places: Sequence[int], size: int
    ) -> list[Chosen]:
        num_adjusted = smallest_fit(max(rule.num_adjusted for rule in rules), self._adjusted)
        rows = choice_arguments(
            rules,
            positions=positions,
            places=places,
            size=size,
            num_adjusted=num_adjusted,
            num_tokens=self._num_tokens,
        )
        # Indexing a device array would compile.
        choice = [np.asarray(field) for field in self.run(("choose", size, num_adjusted), rows)]
        return [
            Chosen([int(choice[0][place])], _ranks(place, *choice[1:], num_wanted=rule.sampling.logprobs))
            for place, rule in zip(places, rules, strict=True)
        ]

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
        keys += [("shared", size, buckets.decode_attention[-1]) for size in buckets.shared]
        keys += [("copy", 1, length) for length in buckets.copies]
        yield from (("choose", batch, number) for number in self._adjusted for batch in buckets.choices)
        yield from sorted(keys, key=lambda key: (key[2], key[1]))

    def _lower(self, key: Key) -> Any:
        kind, size, length = key
        if kind == "choose":
            logits = jax.ShapeDtypeStruct((size, self._num_tokens), jnp.float32, sharding=self._mesh.whole)
            chooser = functools.partial(choose, num_logprobs=self.limits.max_logprobs)
            return jax.jit(chooser).lower(logits, idle_choice(size, num_adjusted=length, num_tokens=self._num_tokens))
        if kind == "copy":
            settled = self._mesh.settled(lambda *given: (copied_prefix(*given, length=length),))
            return jax.jit(settled, donate_argnums=0).lower(self._cache, *_NO_COPY)
        function = getattr(self._functions, kind)
        settled = self._mesh.settled(lambda *given: function(*given, attention_length=length))
        jitted = jax.jit(settled, donate_argnums=1)
        return jitted.lower(self._parameters.arrays, self._cache, *self._idle(kind, size))

    def _run_once(self, key: Key) -> None:
        # The first call of an executable allocates; no request should wait for that.
        kind, size, length = key
        if kind == "choose":
            self._logits_BV = self._mesh.zeros(size, self._num_tokens)
            arguments: tuple[Any, ...] = (idle_choice(size, num_adjusted=length, num_tokens=self._num_tokens),)
        else:
            arguments = _NO_COPY if kind == "copy" else self._idle(kind, size)
        jax.block_until_ready(self._run(key, *arguments))

    def _idle(self, kind: str, size: int) -> tuple[Any, ...]:
        if kind == "shared":
            return idle_shared(size, slots=self.limits.slots)
        return idle_prefill(size) if kind == "prefill" else idle_decode(size)


def _ranks(
    row: int, logprob_B: np.ndarray, token_BN: np.ndarray, logprob_BN: np.ndarray, *, num_wanted: int | None
) -> tuple[Ranks, ...]:
    if num_wanted is None:
        return ()
    top = zip(token_BN[row, :num_wanted].tolist(), logprob_BN[row, :num_wanted].tolist(), strict=True)
    return (Ranks(float(logprob_B[row]), tuple(top)),)


def _no_wait() -> None:
    """One host waits for nobody."""


def _unheard(key: Key, arguments: tuple[Any, ...]) -> None:
    """One host tells nobody."""
