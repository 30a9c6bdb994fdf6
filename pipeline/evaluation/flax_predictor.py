"""A Flax causal language model, judged.

Owns the JAX side of the predictor seam and the choice of device. Knows nothing of checkpoints or of torch. The one
decision: every call pads its rows to one batch size, so each kind of question compiles once, and products run at full
float32 precision even where a GPU would round its inputs.

Shape suffixes: B rows, T positions, V vocabulary, P prompt tokens, N continued tokens, L = P + N.
"""

from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from pipeline.errors import ParameterError
from pipeline.models.description import ModelDescription, ModelKind

TOKENS, MASK, LOGITS = "input_ids", "attention_mask", "logits"


def choose_device(requested: Literal["auto", "cpu", "cuda"]) -> tuple[jax.Device, str]:
    """The first device of the kind asked for, and why it was taken.

    Raises:
        ParameterError: `cuda` was asked for and jax sees no such device.
    """
    if requested == "cpu":
        return jax.devices("cpu")[0], "asked for"
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        if requested == "auto":
            return jax.devices("cpu")[0], "jax sees no CUDA device"
        found = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise ParameterError(
            f"device: cuda was asked for, jax sees: {found} ({error})",
            hint="install the extra cuda12 on a machine with a GPU, or set device: auto",
        ) from error
    return device, "asked for" if requested == "cuda" else "jax sees a CUDA device"


class FlaxPredictor:
    """A described causal language model on one device.

    Args:
        model: with float32 parameters.
        description: of the model: how it is run.
        device: where it runs.
        batch_sequences: rows in one forward pass; fewer are padded, more are cut into several passes.
    """

    def __init__(
        self, model: nnx.Module, *, description: ModelDescription, device: jax.Device, batch_sequences: int
    ) -> None:
        has_mask = _takes_mask(description)
        graph, state = nnx.split(model)
        self._state = jax.device_put(state, device)
        self._device = device
        self._batch_sequences = batch_sequences

        def forward(state: Any, tokens_BT: jax.Array) -> jax.Array:
            inputs = {TOKENS: tokens_BT, **({MASK: jnp.ones_like(tokens_BT)} if has_mask else {})}
            with jax.default_matmul_precision("highest"):
                return description.forward(nnx.merge(graph, state), inputs)[LOGITS]

        def losses(state: Any, rows_BT: jax.Array) -> jax.Array:
            log_probabilities = jax.nn.log_softmax(forward(state, rows_BT[:, :-1]), axis=-1)
            return -jnp.take_along_axis(log_probabilities, rows_BT[:, 1:, None], axis=-1)[..., 0]

        def extend(state: Any, tokens_BL: jax.Array, position: jax.Array) -> jax.Array:
            # A causal model does not see the padding to the right of `position`.
            logits_BV = jnp.take(forward(state, tokens_BL), position - 1, axis=1)
            return tokens_BL.at[:, position].set(jnp.argmax(logits_BV, axis=-1).astype(tokens_BL.dtype))

        self._forward, self._losses, self._extend = jax.jit(forward), jax.jit(losses), jax.jit(extend)

    @property
    def num_compilations(self) -> int:
        """Programs compiled so far; stays the same as long as the lengths of rows do."""
        return sum(function._cache_size() for function in (self._forward, self._losses, self._extend))

    def logits(self, tokens_BT: NDArray[Any]) -> NDArray[Any]:
        """float32 [B, T, V] of int32 [B, T]."""
        return np.concatenate([np.asarray(self._forward(self._state, t))[:n] for t, n in self._batches(tokens_BT)])

    def token_losses(self, rows_BT: NDArray[Any]) -> NDArray[Any]:
        """`-log p(next token)` in nats, float32 [B, T - 1], of int32 rows [B, T]."""
        return np.concatenate([np.asarray(self._losses(self._state, t))[:n] for t, n in self._batches(rows_BT)])

    def continue_greedily(self, prompts_BP: NDArray[Any], *, num_tokens: int) -> NDArray[Any]:
        """int32 [B, N]; see `Predictor`."""
        num_prompt = prompts_BP.shape[1]
        done = []
        for tokens_BL, num_real in self._batches(np.pad(prompts_BP, ((0, 0), (0, num_tokens)))):
            for position in range(num_prompt, num_prompt + num_tokens):
                tokens_BL = self._extend(self._state, tokens_BL, np.int32(position))
            done.append(np.asarray(tokens_BL)[:num_real, num_prompt:])
        return np.concatenate(done)

    def _batches(self, tokens: NDArray[Any]) -> Iterator[tuple[jax.Array, int]]:
        """(padded rows on the device, how many of them are real)."""
        size = self._batch_sequences
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size].astype(np.int32)
            padded = np.pad(part, ((0, size - len(part)), (0, 0)))
            yield jax.device_put(padded, self._device), len(part)


def _takes_mask(description: ModelDescription) -> bool:
    """True where the model wants to be told which tokens are real.

    Raises:
        ParameterError: it is no language model, or wants more than tokens and their mask.
    """
    if description.kind is not ModelKind.CAUSAL_LM:
        raise ParameterError(
            f"text is scored with a {ModelKind.CAUSAL_LM} model; this one ({description.name}) is {description.kind}"
        )
    wanted = set(description.example_inputs(seed=0))
    if not {TOKENS} <= wanted <= {TOKENS, MASK}:
        raise ParameterError(
            f"text is scored with a model of {TOKENS} (and {MASK}); this one takes {', '.join(sorted(wanted))}"
        )
    return MASK in wanted
