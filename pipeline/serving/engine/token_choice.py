"""The next token of requests that ask for more than a draw: grammar mask, bias, penalties, log-probabilities.

Owns what is done to logits before `sampling.py`, and the report of log-probabilities. Knows nothing of requests. The
one decision: this is a function of logits alone, compiled once for each batch size beside the decode buckets and not
inside them, so it costs no second compile of the model, and a request without such wishes runs none of it.

The order is vLLM's (`v1/sample/sampler.py`): log-probabilities of the model's own logits are taken first; then the
grammar's mask, logit bias, repetition penalty (over prompt and completion, Keskar et al. 2019, section 4.1), frequency
and presence penalty (over the completion, as in OpenAI's API reference); then temperature, min-p, top-k and top-p.

Shape suffixes: B batch, V vocabulary, W 32-bit words of a mask over V, M adjusted tokens, N reported alternatives.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pipeline.serving.engine.sampling import SamplingRows, sample
from pipeline.serving.engine.token_rules import NOT_SEEN

_WORD_BITS = 32


class ChoiceRows(NamedTuple):
    """What is wished for each row."""

    sampling: SamplingRows
    position_B: Any
    """int32; where the token goes."""
    mask_BW: Any
    """uint32; bit t % 32 of word t // 32 allows token t."""
    token_BM: Any
    """int32; the tokens whose logits change, each once; V or more where unused."""
    count_BM: Any
    """int32; how often the completion has it; `NOT_SEEN` where neither prompt nor completion has it."""
    bias_BM: Any
    """float32."""
    repetition_B: Any
    """float32; 1 is none."""
    presence_B: Any
    """float32; 0 is none."""
    frequency_B: Any
    """float32; 0 is none."""
    wants_logprobs: Any
    """bool []; of any row."""


class Choice(NamedTuple):
    """The tokens, and log-probabilities where any row wants them."""

    token_B: jax.Array
    """int32."""
    logprob_B: jax.Array
    """float32; of the token."""
    top_token_BN: jax.Array
    """int32; the most likely ones, best first."""
    top_logprob_BN: jax.Array
    """float32."""


def choose(logits_BV: jax.Array, rows: ChoiceRows, *, num_logprobs: int) -> Choice:
    """The token of each row; `num_logprobs` is N, and 0 compiles no log-probabilities."""
    allowed_BV = _bits(rows.mask_BW, num_tokens=logits_BV.shape[1])
    masked_BV = jnp.where(allowed_BV, logits_BV, -jnp.inf)
    is_adjusted = jnp.any(rows.token_BM < logits_BV.shape[1])
    adjusted_BV = jax.lax.cond(is_adjusted, lambda: adjust(masked_BV, rows), lambda: masked_BV)
    token_B = sample(adjusted_BV, rows=rows.sampling, positions_B=rows.position_B)
    num_rows = logits_BV.shape[0]
    nothing = (
        jnp.zeros(num_rows, jnp.float32),
        jnp.zeros((num_rows, num_logprobs), jnp.int32),
        jnp.zeros((num_rows, num_logprobs), jnp.float32),
    )
    if num_logprobs == 0:
        return Choice(token_B, *nothing)

    def reported() -> tuple[jax.Array, jax.Array, jax.Array]:
        normalizer_B = jax.nn.logsumexp(logits_BV, axis=-1)
        chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]
        top_BN, token_BN = jax.lax.top_k(logits_BV, num_logprobs)
        return chosen_B - normalizer_B, token_BN, top_BN - normalizer_B[:, None]

    return Choice(token_B, *jax.lax.cond(rows.wants_logprobs, reported, lambda: nothing))


def adjust(logits_BV: jax.Array, rows: ChoiceRows) -> jax.Array:
    """Logits with bias and penalties; all other logits keep every bit."""
    num_rows, num_tokens = logits_BV.shape
    logits_BM = jnp.take_along_axis(logits_BV, jnp.minimum(rows.token_BM, num_tokens - 1), axis=1) + rows.bias_BM
    factor_BM = jnp.where(rows.count_BM == NOT_SEEN, 1.0, rows.repetition_B[:, None])
    logits_BM = jnp.where(logits_BM > 0, logits_BM / factor_BM, logits_BM * factor_BM)
    times_BM = jnp.maximum(rows.count_BM, 0).astype(jnp.float32)
    logits_BM -= rows.frequency_B[:, None] * times_BM
    logits_BM -= rows.presence_B[:, None] * (times_BM > 0)
    # Unused entries lie outside and are dropped.
    return logits_BV.at[jnp.arange(num_rows)[:, None], rows.token_BM].set(logits_BM, mode="drop")


def _bits(mask_BW: jax.Array, *, num_tokens: int) -> jax.Array:
    bits_BWb = (mask_BW[:, :, None] >> jnp.arange(_WORD_BITS, dtype=jnp.uint32)) & 1
    return bits_BWb.reshape(mask_BW.shape[0], -1)[:, :num_tokens] == 1
