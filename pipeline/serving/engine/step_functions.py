"""What an executable of the model computes: a prefill chunk, several decode steps, chunks and one step in one pass.

Owns the functions that are traced for every bucket. Knows nothing of requests, buckets or how a result is read. The one
decision: several decode steps and the choice of their tokens are one loop on the device, and only token ids leave it.
The logits of the last step are returned too, and stay on the device for `token_choice.py`.

Shape suffixes: B batch, T chunk tokens, N tokens of a shared pass, S slots, K decode steps, E stop ids, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pipeline.models.decoders.model import Cache, Decoder
from pipeline.models.packed.product import counting_rows
from pipeline.serving.engine.sampling import SamplingRows, sample


class Rows(NamedTuple):
    """A decode call's rows; an unused row has budget 0. Where there are as many as slots, row b is slot b."""

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
        with counting_rows(count):
            return self.rebuild(leaves).extend(
                tokens_BT,
                cache=cache,
                positions_BT=positions_T[None],
                attention_length=attention_length,
                slots_B=slot[None],
                take_B=count[None] - 1,
            )

    def shared(
        self, leaves: Any, cache: Cache, placed_3N: Any, counts: Any, ends_S: Any, *, attention_length: int
    ) -> tuple[jax.Array, Cache]:
        """Tokens of several prompts and of rows that decode, each a row of its own; float32 logits [S, V].

        `placed_3N` is int32: each token, its slot, its position. `ends_S` is int32: the tokens to give logits for.
        `counts`, int32 [2]: how many of each are no padding; the first ones are those.
        """
        (token_N, slot_N, position_N), (num_tokens, num_ends) = placed_3N, counts
        order_N = jnp.arange(token_N.shape[0], dtype=jnp.int32)
        order_S = jnp.arange(ends_S.shape[0], dtype=jnp.int32)
        with counting_rows(num_tokens, order_B=order_N), counting_rows(num_ends, order_B=order_S):
            logits_SV, cache = self.rebuild(leaves).extend(
                token_N[:, None],
                cache=cache,
                positions_BT=jnp.where(order_N < num_tokens, position_N, self.context)[:, None],
                attention_length=attention_length,
                slots_B=slot_N,
                rows_M=ends_S,
            )
        return self.whole(logits_SV), cache

    def decode(
        self, leaves: Any, cache: Cache, rows: Rows, num_steps: Any, *, attention_length: int
    ) -> tuple[jax.Array, jax.Array, jax.Array, Cache]:
        """Up to `num_steps` tokens of each row, int32 [B, K]; how many of them count, [B]; the last logits [B, V]."""
        model = self.rebuild(leaves)
        num_rows, num_slots = rows.token_B.shape[0], cache[0][0].shape[0]
        # Gathering the slots of 8 rows takes 5 of 55 ms a step (SmolLM2-135M); a full batch needs none.
        slots_B = None if num_rows == num_slots else rows.slot_B

        def unfinished(carry: Any) -> jax.Array:
            step, is_active_B, *_ = carry
            return (step < num_steps) & jnp.any(is_active_B)

        def one_step(carry: Any) -> Any:
            step, is_active_B, token_B, count_B, tokens_BK, _, cache = carry
            position_B = jnp.where(is_active_B, rows.position_B + step, self.context)
            logits_BV, cache = model.extend(
                token_B[:, None],
                cache=cache,
                positions_BT=position_B[:, None],
                attention_length=attention_length,
                slots_B=slots_B,
            )
            logits_BV = self.whole(logits_BV)
            next_B = sample(logits_BV, rows=rows.sampling, positions_B=position_B + 1)
            tokens_BK = tokens_BK.at[:, step].set(next_B)
            count_B = count_B + is_active_B
            is_active_B &= (count_B < rows.budget_B) & jnp.all(next_B[:, None] != rows.stop_BE, axis=1)
            return step + 1, is_active_B, next_B, count_B, tokens_BK, logits_BV, cache

        start = (
            jnp.int32(0),
            rows.budget_B > 0,
            rows.token_B,
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros((num_rows, self.decode_steps), jnp.int32),
            jnp.zeros((num_rows, model.config.vocab_size), jnp.float32),
            cache,
        )
        _, _, _, count_B, tokens_BK, logits_BV, cache = jax.lax.while_loop(unfinished, one_step, start)
        return tokens_BK, count_B, logits_BV, cache


def copied_prefix(cache: Cache, source: Any, target: Any, *, length: int) -> Cache:
    """The cache with the first `length` positions of slot `source` also in slot `target`."""

    def copied(part_SKPH: jax.Array) -> jax.Array:
        num_heads, head_dim = part_SKPH.shape[1], part_SKPH.shape[3]
        rows = jax.lax.dynamic_slice(part_SKPH, (source, 0, 0, 0), (1, num_heads, length, head_dim))
        return jax.lax.dynamic_update_slice(part_SKPH, rows, (target, 0, 0, 0))

    return jax.tree.map(copied, cache)
