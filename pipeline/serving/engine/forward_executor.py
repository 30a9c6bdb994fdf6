"""The compiled model: one executable a batch size and length, all from one function.

Owns parameters and executables of a replica that runs whole forward passes. Knows nothing of requests or threads. The
one decision: executables are compiled ahead into a closed table and rows are padded up to it, so a shape outside the
table is an error at once and nothing compiles while serving.

Shape suffixes: B batch, L padded length.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.errors import ParameterError
from pipeline.models.packed.modules import choose_products, pack_projections
from pipeline.models.packed.product import counting_rows, real_rows
from pipeline.serving.engine.batch_request import Arrays, Row
from pipeline.serving.engine.buckets import smallest_fit, steps
from pipeline.serving.engine.passes import Pass, PassShapes

_COMPILE_THREADS = 2
_MAX_COMPLAINTS = 5
SMALLEST_LENGTH = 16
LENGTH = "length"
"""The name of the dimension along which rows are padded."""
MASK = "attention_mask"
"""The input that is 0 where a token is padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputForm:
    """One input of a row."""

    shape: tuple[int | str, ...]
    """Without the batch axis; a number is fixed, `length` is what is padded."""
    dtype: str
    padding: int = 0
    """What is written behind a row that is shorter than its bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardShapes:
    """What is compiled."""

    inputs: Mapping[str, InputForm]
    passes: PassShapes


class ForwardExecutor:
    """Runs batches of rows on the device."""

    def __init__(
        self,
        model: nnx.Module,
        *,
        forward: Callable[[nnx.Module, Mapping[str, Any]], Mapping[str, jax.Array]],
        shapes: ForwardShapes,
        device: Any,
        dtype: str,
    ) -> None:
        """Place `model`, which is taken over, and learn what it gives.

        Args:
            model: the module.
            forward: gives outputs whose first axis is the batch.
            shapes: what is compiled.
            device: where.
            dtype: float inputs are given in it.

        Raises:
            ParameterError: an output has no batch axis, so rows of several requests cannot share a pass.
        """
        self.shapes = shapes
        self._is_packed = choose_products(platform=device.platform, dtype=dtype).is_packed
        mask = shapes.inputs.get(MASK)
        self._counts_tokens = self._is_packed and mask is not None and mask.shape == (LENGTH,)
        graph, state = nnx.split(self._served(model))
        self._names, leaves = _named(state)
        tree = jax.tree.structure(state)
        # A list: flattening the state of a module at every call takes longer than handing over its arrays.
        self._leaves: list[jax.Array] = jax.device_put(leaves, device)

        def compute(leaves: Sequence[Any], inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
            cast = {
                name: value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value
                for name, value in inputs.items()
            }
            with self._counting(inputs):
                outputs = forward(nnx.merge(graph, jax.tree.unflatten(tree, leaves)), cast)
            return {
                name: value.astype(jnp.float32) if jnp.issubdtype(value.dtype, jnp.floating) else value
                for name, value in outputs.items()
            }

        self._compute = compute
        self._table: dict[tuple[int, int], Any] = {}
        self.outputs: Mapping[str, tuple[int, ...]] = self._row_outputs()
        """Shape of one row's outputs by name."""

    @property
    def num_executables(self) -> int:
        """One for each shape of a pass."""
        return len(self.shapes.passes.compiled())

    def bucket(self, length: int) -> int:
        """The smallest compiled length that holds `length`."""
        return smallest_fit(length, self.shapes.passes.lengths)

    def warm_up(self, *, on_progress: Callable[[int, int], None] | None = None) -> float:
        """Compile every shape, smallest first, and run each once; returns seconds."""
        started = time.monotonic()
        keys = self.shapes.passes.compiled()
        jitted = jax.jit(self._compute)
        with ThreadPoolExecutor(max_workers=_COMPILE_THREADS) as pool:
            # Tracing holds the interpreter lock, compiling does not: the next is traced while one compiles.
            pending = [(key, pool.submit(jitted.lower(self._leaves, self._example(*key)).compile)) for key in keys]
            for done, (key, future) in enumerate(pending, start=1):
                self._table[key] = future.result()
                if on_progress is not None:
                    on_progress(done, len(keys))
        for key in keys:
            # The first call of an executable allocates; no request should wait for that.
            jax.block_until_ready(self._table[key](self._leaves, self._example(*key)))
        return time.monotonic() - started

    def leaves_of(self, model: nnx.Module) -> dict[str, Any]:
        """What `place` takes, from a module of the same description, which is taken over."""
        names, leaves = _named(nnx.split(self._served(model))[1])
        return dict(zip(names, leaves, strict=True))

    def _served(self, model: nnx.Module) -> nnx.Module:
        return pack_projections(model) if self._is_packed else model

    def _counting(self, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Nobody reads what a text encoder computes of padding, and no other row sees it."""
        if not self._counts_tokens:
            return nullcontext()
        count, order = real_rows(inputs[MASK])
        return counting_rows(count, order_B=order)

    def place(self, leaves: Mapping[str, Any]) -> list[jax.Array]:
        """New parameters on the device, beside those in use. Compiles nothing; for any thread.

        Raises:
            ParameterError: a name, shape or dtype differs from what was compiled.
        """
        wanted = dict(zip(self._names, self._leaves, strict=True))
        differing = [
            name
            for name in {**wanted, **leaves}
            if name not in wanted or name not in leaves or _form(wanted[name]) != _form(leaves[name])
        ]
        if differing:
            raise ParameterError(
                f"the new parameters differ from those that are served in {len(differing)} leaves: "
                f"{', '.join(differing[:_MAX_COMPLAINTS])}",
                hint="a model of other shapes or dtype needs an executor of its own",
            )
        shardings = [leaf.sharding for leaf in self._leaves]
        placed: list[jax.Array] = jax.device_put([leaves[name] for name in self._names], shardings)
        return jax.block_until_ready(placed)

    def exchange(self, placed: list[jax.Array]) -> list[jax.Array]:
        """Run with these (of `place`) from the next batch on; returns those in use until now."""
        before, self._leaves = self._leaves, placed
        return before

    def on_host(self, placed: Sequence[jax.Array]) -> dict[str, Any]:
        """What `exchange` returned, as `place` takes it, in the host's memory."""
        return {name: np.asarray(leaf) for name, leaf in zip(self._names, placed, strict=True)}

    def run(self, rows: Sequence[Row]) -> list[Arrays]:
        """The outputs of each row, numpy, from as many forward passes as `PassShapes.split` makes.

        Raises:
            ValueError: the rows fit into no compiled shape.
        """
        passes = self.shapes.passes.split([row.length for row in rows])
        # All are handed to the device before the first is waited for.
        made = [self._table[one.batch, one.length](self._leaves, self._inputs(rows, one)) for one in passes]
        results: list[Arrays] = [{}] * len(rows)
        for one, outputs in zip(passes, made, strict=True):
            # One transfer for each output; slicing the device array would compile.
            arrays = {name: np.asarray(value) for name, value in outputs.items()}
            for index, row in enumerate(one.rows):
                results[row] = {name: array[index] for name, array in arrays.items()}
        return results

    def _inputs(self, rows: Sequence[Row], one: Pass) -> dict[str, np.ndarray]:
        inputs = {
            name: self._padded([rows[row].inputs[name] for row in one.rows], form, batch=one.batch, length=one.length)
            for name, form in self.shapes.inputs.items()
        }
        if self._counts_tokens:  # nobody reads unused rows: they are padding to the last token, and are not computed
            inputs[MASK][len(one.rows) :] = 0
        return inputs

    def _padded(self, values: Sequence[np.ndarray], form: InputForm, *, batch: int, length: int) -> np.ndarray:
        """[B, ...]; unused rows are copies of the first, so that nothing in them can be out of range."""
        out = np.full((batch, *_filled(form.shape, length)), form.padding, form.dtype)
        for index in range(batch):
            value = values[index] if index < len(values) else values[0]
            within: Any = (index, *(slice(size) for size in value.shape))
            out[within] = value
        return out

    def _example(self, batch: int, length: int) -> dict[str, np.ndarray]:
        return {
            name: np.ones((batch, *_filled(form.shape, length)), form.dtype)
            for name, form in self.shapes.inputs.items()
        }

    def _row_outputs(self) -> dict[str, tuple[int, ...]]:
        length = self.shapes.passes.lengths[-1]
        found = [jax.eval_shape(self._compute, self._leaves, self._example(batch, length)) for batch in (2, 3)]
        wrong = [
            name
            for name, value in found[0].items()
            if not value.shape or value.shape[0] != 2 or found[1][name].shape != (3, *value.shape[1:])
        ]
        if wrong:
            raise ParameterError(
                f"outputs without a batch axis: {', '.join(wrong)}; rows of several requests cannot share a pass",
                hint="return tensors whose first axis is that of the inputs",
            )
        return {name: tuple(value.shape[1:]) for name, value in found[0].items()}


def _named(state: Any) -> tuple[list[str], list[Any]]:
    """Paths and leaves, in the order of the flattened state."""
    found = jax.tree.leaves_with_path(state)
    return [jax.tree_util.keystr(path) for path, _ in found], [leaf for _, leaf in found]


def _form(leaf: Any) -> tuple[tuple[int, ...], str]:
    return tuple(leaf.shape), str(leaf.dtype)


def _filled(shape: Sequence[int | str], length: int) -> tuple[int, ...]:
    return tuple(length if isinstance(size, str) else size for size in shape)


def batch_sizes(largest: int) -> tuple[int, ...]:
    """1, 4, 16, ... and `largest`: a batch is at most four times as large as its rows."""
    return steps(1, largest, factor=4)


def length_sizes(largest: int) -> tuple[int, ...]:
    """16, 32, 48, 64, 96, 128, 192, ... and `largest`: a text is padded by a fifth on average."""
    doubled = steps(min(SMALLEST_LENGTH, largest), largest, factor=2)
    return tuple(sorted({*doubled, *(size * 3 // 2 for size in doubled[1:-1] if size * 3 // 2 < largest)}))
