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

    def fuse(self, *, shards: int = 1) -> None:
        """Nothing: the experts' products are grouped already."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        weights_NC, chosen_NC = self._route(x_ND)
        y_ND = jax.lax.platform_dependent(x_ND, weights_NC, chosen_NC, cpu=self._one_by_one, default=self._grouped)
        return y_ND.astype(x_BTD.dtype).reshape(x_BTD.shape)

    def _route(self, x_ND: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights (float32) and indices of each token's experts; softmax over all experts comes first."""
        probabilities_NE = jax.nn.softmax(self.router(x_ND).astype(jnp.float32), axis=-1)
        weights_NC, chosen_NC = jax.lax.top_k(probabilities_NE, self.settings.num_per_token)
        if self.settings.normalizes:
            weights_NC = weights_NC / jnp.sum(weights_NC, axis=-1, keepdims=True)
        return weights_NC, chosen_NC

    def _one_by_one(self, x_ND: jax.Array, weights_NC: jax.Array, chosen_NC: jax.Array) -> jax.Array:
        """Every expert that some token has chosen, on all tokens, float32 [N, D].

        XLA:CPU has no grouped product: `ragged_dot` multiplies by every expert and takes 3 to 8 times as long as this
        (1 to 32 tokens, 8 to 128 experts), and gathering the chosen experts' weights copies them.
        """
        rows_N = jnp.arange(x_ND.shape[0])
        shares_EN = jnp.zeros((self.settings.num, x_ND.shape[0])).at[chosen_NC, rows_N[:, None]].set(weights_NC)
        act = ACTIVATIONS[self.activation]

        def one_more(y_ND: jax.Array, expert: Any) -> tuple[jax.Array, None]:
            gate_DM, up_DM, down_MD, share_N = expert

            def added(y_ND: jax.Array) -> jax.Array:
                out_ND = (act(x_ND @ gate_DM) * (x_ND @ up_DM)) @ down_MD
                return y_ND + out_ND.astype(jnp.float32) * share_N[:, None]

            return jax.lax.cond(jnp.any(share_N != 0), added, lambda y_ND: y_ND, y_ND), None

        y_ND, _ = jax.lax.scan(one_more, jnp.zeros(x_ND.shape, jnp.float32), (*self._kernels(), shares_EN))
        return y_ND

    def _grouped(self, x_ND: jax.Array, weights_NC: jax.Array, chosen_NC: jax.Array) -> jax.Array:
        """Tokens sorted by expert, so that each expert's are one block of a grouped product; float32 [N, D]."""
        gate_EDM, up_EDM, down_EMD = self._kernels()
        order_A = jnp.argsort(chosen_NC.reshape(-1))
        rows_A = order_A // self.settings.num_per_token
        sizes_E = jnp.bincount(chosen_NC.reshape(-1), length=self.settings.num)
        x_AD = x_ND[rows_A]
        gate_AM = ACTIVATIONS[self.activation](jax.lax.ragged_dot(x_AD, gate_EDM, sizes_E))
        hidden_AM = gate_AM * jax.lax.ragged_dot(x_AD, up_EDM, sizes_E)
        y_AD = jax.lax.ragged_dot(hidden_AM, down_EMD, sizes_E).astype(jnp.float32)
        shares_A = weights_NC.reshape(-1)[order_A]
        return jnp.zeros(x_ND.shape, jnp.float32).at[rows_A].add(y_AD * shares_A[:, None])

    def _kernels(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        stack = self.experts
        return stack.gate_proj.kernel[...], stack.up_proj.kernel[...], stack.down_proj.kernel[...]
