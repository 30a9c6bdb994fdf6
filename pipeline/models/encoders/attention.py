"""Multi-head attention of encoders and of decoders behind them.

Owns the projections, the masks and the mixing. Knows no model and no cache. The one decision: what may not be seen gets
one large negative score, so that a row which may see nothing gives finite numbers (the mean of all values, as in
transformers) and not NaN.

Leaf paths: `{q,k,v,o}_proj.kernel` [in, out] and `.bias` where the family has them.

Shape suffixes: B batch, T tokens that look, S tokens that are seen, N heads, H head size, D hidden.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class Attention(nnx.Module):
    """Self-attention, or attention to a `context`."""

    def __init__(
        self,
        *,
        size: int,
        num_heads: int,
        head_dim: int,
        biases: str,
        rngs: nnx.Rngs,
        scale: float | None = None,
    ) -> None:
        """Make the projections.

        Args:
            size: hidden size of the tokens.
            num_heads: heads of queries, keys and values alike.
            head_dim: size of a head.
            biases: which projections have one, as letters: `qkvo`, `qvo`, `o` or none.
            rngs: for the initial kernels.
            scale: of the scores; `head_dim ** -0.5` where None.
        """
        inner = num_heads * head_dim
        self.q_proj = nnx.Linear(size, inner, use_bias="q" in biases, rngs=rngs)
        self.k_proj = nnx.Linear(size, inner, use_bias="k" in biases, rngs=rngs)
        self.v_proj = nnx.Linear(size, inner, use_bias="v" in biases, rngs=rngs)
        self.o_proj = nnx.Linear(inner, size, use_bias="o" in biases, rngs=rngs)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        context_BSD: jax.Array | None = None,
        seen: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """[B, T, D] to [B, T, D].

        Args:
            x_BTD: the tokens that look.
            context_BSD: the tokens that are seen; `x_BTD` itself where None.
            seen: bool, broadcastable to [B, N, T, S].
            bias: added to the scores, broadcastable to [B, N, T, S].
        """
        context_BSD = x_BTD if context_BSD is None else context_BSD
        q_BTNH = self._heads(self.q_proj(x_BTD))
        k_BSNH, v_BSNH = self._heads(self.k_proj(context_BSD)), self._heads(self.v_proj(context_BSD))
        mixed_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BSNH, v_BSNH, bias=bias, mask=seen, scale=self.scale)
        return self.o_proj(mixed_BTNH.reshape(*x_BTD.shape[:2], -1))

    def _heads(self, x_BTI: jax.Array) -> jax.Array:
        return x_BTI.reshape(*x_BTI.shape[:2], self.num_heads, self.head_dim)


def padding_mask(attention_mask_BS: jax.Array | None) -> jax.Array | None:
    """Bool [B, 1, 1, S] of torch's mask of ones (seen) and zeros (padding)."""
    return None if attention_mask_BS is None else jnp.asarray(attention_mask_BS)[:, None, None, :] != 0


def causal_mask(num_tokens: int, *, attention_mask_BS: jax.Array | None = None) -> jax.Array:
    """Bool [1 or B, 1, T, T]: each token sees itself and those before it, less padding."""
    before = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))[None, None]
    padding = padding_mask(attention_mask_BS)
    return before if padding is None else before & padding
