"""What an executable computes: a prefill chunk, several decode steps, the token after a prompt.

Owns the functions that are traced for every bucket. Knows nothing of requests, buckets or how a result is read. The one
decision: several decode steps and the choice of their tokens are one loop on the device, and only token ids leave it.

Shape suffixes: B batch, T chunk tokens, K decode steps, E stop ids, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pipeline.models.decoders.model import Cache, Decoder
from pipeline.serving.sampling import SamplingRows, sample


class Rows(NamedTuple):
    """A decode call's rows; an unused row has budget 0."""

    slot_B: Any
    token_B: Any
    position_B: Any
    budget_B: Any
    stop_BE: Any
    sampling: SamplingRows


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFunctions:
    """The functions of one model."""

    rebuild: Callable[[Any], Decoder]
    """From parameter leaves, which are arguments and never constants of an executable."""
    whole: Callable[[jax.Array], jax.Array]
    """The same array on every device of the model's mesh: the choice of a token divided over the vocabulary would be a
    dozen exchanges a step instead of one."""
    context: int
    decode_steps: int
    """The most steps in one call."""

    def prefill(
        self, leaves: Any, cache: Cache, tokens_BT: Any, placed: Any, *, attention_length: int
    ) -> tuple[jax.Array, Cache]:
        """One chunk of one prompt; float32 logits [1, V] of its last token.

        `placed` is int32 [3]: slot, position of the first token, number of tokens that are no padding.
        """
        slot, start, count = placed
        offsets_T = jnp.arange(tokens_BT.shape[1])
        positions_T = jnp.where(offsets_T < count, start + offsets_T, self.context)
        return self.rebuild(leaves).extend(
            tokens_BT,
            cache=cache,
            positions_BT=positions_T[None],
            attention_length=attention_length,
            slots_B=slot[None],
            take_B=count[None] - 1,
        )

    def decode(
        self, leaves: Any, cache: Cache, rows: Rows, num_steps: Any, *, attention_length: int
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Up to `num_steps` tokens of each row: int32 [B, K], and how many of them count [B]."""
        model = self.rebuild(leaves)
        num_rows = rows.token_B.shape[0]

        def unfinished(carry: Any) -> jax.Array:
            step, is_active_B, *_ = carry
            return (step < num_steps) & jnp.any(is_active_B)

        def one_step(carry: Any) -> Any:
            step, is_active_B, token_B, count_B, tokens_BK, cache = carry
            position_B = jnp.where(is_active_B, rows.position_B + step, self.context)
            logits_BV, cache = model.extend(
                token_B[:, None],
                cache=cache,
                positions_BT=position_B[:, None],
                attention_length=attention_length,
                slots_B=rows.slot_B,
            )
            logits_BV = self.whole(logits_BV)
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
            jnp.zeros((num_rows, self.decode_steps), jnp.int32),
            cache,
        )
        _, _, _, count_B, tokens_BK, cache = jax.lax.while_loop(unfinished, one_step, start)
        return tokens_BK, count_B, cache


def first_token(logits_BV: jax.Array, rows: SamplingRows, positions_B: Any) -> jax.Array:
    """The token after a prompt; int32 [B]."""
    return sample(logits_BV, rows=rows, positions_B=positions_B)
