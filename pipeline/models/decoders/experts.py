"""A feed-forward network of many experts, of which each token takes a few.

Owns the router and the experts' weights, stacked. Knows nothing of attention. The one decision: no token is ever
dropped and no expert has a capacity; the result is that of running each token through its own experts.

Shape suffixes: B batch, T tokens, N tokens of the whole batch, A assignments = N * experts a token, E experts,
C experts a token, D hidden, M mlp.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.models.decoders.config import DecoderConfig, Experts
from pipeline.models.decoders.layers import ACTIVATIONS, Projection, maker


class ExpertStack(nnx.Module):
    """The weights of all experts: `gate_proj`, `up_proj` kernels [E, D, M], `down_proj` kernel [E, M, D]."""

    def __init__(self, config: DecoderConfig, *, experts: Experts, rngs: nnx.Rngs, dtype: Any) -> None:
        hidden, inner = config.hidden_size, experts.intermediate_size

        def made(num_in: int, num_out: int) -> Projection:
            normal = jax.random.normal(rngs.params(), (experts.num, num_in, num_out), dtype)
            return Projection(normal * jnp.asarray(config.initializer_range, dtype), bias=None)

        self.gate_proj, self.up_proj, self.down_proj = made(hidden, inner), made(hidden, inner), made(inner, hidden)


class ExpertMlp(nnx.Module):
    """Routed feed-forward network; takes the place of `Mlp`."""

    def __init__(self, config: DecoderConfig, *, experts: Experts, rngs: nnx.Rngs, dtype: Any) -> None:
        self.settings = experts
        self.activation = config.activation
        self.router = maker(config, use_bias=False, rngs=rngs, dtype=dtype)(config.hidden_size, experts.num)
        self.experts = ExpertStack(config, experts=experts, rngs=rngs, dtype=dtype)

    def fuse(self) -> None:
        """Nothing: the experts' products are grouped already."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        weights_NC, chosen_NC = self._route(x_ND)
        num_tokens, each = chosen_NC.shape
        # Tokens are sorted by expert, so that each expert's are one block of a grouped product.
        order_A = jnp.argsort(chosen_NC.reshape(-1))
        rows_A = order_A // each
        sizes_E = jnp.bincount(chosen_NC.reshape(-1), length=self.settings.num)
        y_AD = self._apply(x_ND[rows_A], sizes_E=sizes_E)
        y_AD = y_AD.astype(jnp.float32) * weights_NC.reshape(-1)[order_A][:, None]
        y_ND = jnp.zeros((num_tokens, x_ND.shape[-1]), jnp.float32).at[rows_A].add(y_AD)
        return y_ND.astype(x_BTD.dtype).reshape(x_BTD.shape)

    def _route(self, x_ND: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights (float32) and indices of each token's experts; softmax over all experts comes first."""
        probabilities_NE = jax.nn.softmax(self.router(x_ND).astype(jnp.float32), axis=-1)
        weights_NC, chosen_NC = jax.lax.top_k(probabilities_NE, self.settings.num_per_token)
        if self.settings.normalizes:
            weights_NC = weights_NC / jnp.sum(weights_NC, axis=-1, keepdims=True)
        return weights_NC, chosen_NC

    def _apply(self, x_AD: jax.Array, *, sizes_E: jax.Array) -> jax.Array:
        stack = self.experts
        gate_AM = jax.lax.ragged_dot(x_AD, stack.gate_proj.kernel[...], sizes_E)
        up_AM = jax.lax.ragged_dot(x_AD, stack.up_proj.kernel[...], sizes_E)
        hidden_AM = ACTIVATIONS[self.activation](gate_AM) * up_AM
        return jax.lax.ragged_dot(hidden_AM, stack.down_proj.kernel[...], sizes_E)
