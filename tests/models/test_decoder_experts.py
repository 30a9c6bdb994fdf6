"""Experts: both ways of computing them agree, and no token is dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pipeline.models.decoders.experts import ExpertMlp
from pipeline.models.decoders.readers import read_decoder

CONFIG = {
    "model_type": "mixtral",
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 14,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "initializer_range": 0.5,
}
# Float32 sums of 14 products in another order; seen 2e-7 of the largest.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def experts():
    config = read_decoder(CONFIG)
    return nnx.jit(lambda: ExpertMlp(config, experts=config.experts, rngs=nnx.Rngs(0), dtype=jnp.float32))()


def by_hand(experts, rows):
    """Token by token, in numpy."""
    router, gate, up, down = (
        np.asarray(kernel[...], np.float64)
        for kernel in (
            experts.router.kernel,
            experts.experts.gate_proj.kernel,
            experts.experts.up_proj.kernel,
            experts.experts.down_proj.kernel,
        )
    )
    out = np.zeros_like(rows, np.float64)
    for row, x in enumerate(rows.astype(np.float64)):
        scores = np.exp(x @ router)
        chosen = np.argsort(-scores)[:3]
        for expert in chosen:
            raised = x @ gate[expert]
            hidden = raised / (1 + np.exp(-raised)) * (x @ up[expert])
            out[row] += scores[expert] / scores[chosen].sum() * (hidden @ down[expert])
    return out


@pytest.mark.parametrize("way", ["_one_by_one", "_grouped"])
def test_each_token_is_run_through_its_own_experts(experts, way):
    x_ND = np.random.default_rng(0).normal(size=(9, 12)).astype(np.float32)
    found = jax.jit(lambda x: getattr(experts, way)(x, *experts._route(x)))(x_ND)
    expected = by_hand(experts, x_ND)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max())


def test_tokens_that_all_want_one_expert_all_get_it(experts):
    x_BTD = jnp.tile(jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, 12)), jnp.float32), (2, 16, 1))
    out_BTD = jax.jit(lambda x: experts(x))(x_BTD)
    np.testing.assert_array_equal(out_BTD, jnp.broadcast_to(out_BTD[:1, :1], out_BTD.shape))
    expected = by_hand(experts, np.asarray(x_BTD[0, :1]))
    np.testing.assert_allclose(out_BTD[0, :1], expected, atol=TOLERANCE * np.abs(expected).max())


def test_gradients_reach_every_chosen_expert(experts):
    x_ND = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, 12)), jnp.float32)
    gradients = nnx.jit(nnx.grad(lambda module, x: jnp.sum(module(x) ** 2)))(experts, x_ND)
    _, chosen = experts._route(x_ND[0])
    touched = np.any(np.asarray(gradients["experts"]["gate_proj"]["kernel"][...]) != 0, axis=(1, 2))
    np.testing.assert_array_equal(np.flatnonzero(touched), np.unique(chosen))
