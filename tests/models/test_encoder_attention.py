"""Who sees whom: padding, causality, and rows that see nothing."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.models.encoders.attention import Attention, causal_mask, padding_mask

SIZE, HEADS, HEAD = 20, 4, 6


def attention(biases="qkvo"):
    return Attention(size=SIZE, num_heads=HEADS, head_dim=HEAD, biases=biases, rngs=nnx.Rngs(3))


run = nnx.jit(lambda module, x, seen: module(x, seen=seen))


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def made():
    """Drawn by numpy: the initializers of Flax take seconds to compile."""
    graph, state = nnx.split(nnx.eval_shape(attention))
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(drawn(*leaf.shape) * 0.3), state))


def changed(x, where, value):
    copy = x.copy()
    copy[where] += value
    return copy


def test_what_stands_in_the_padding_does_not_matter():
    x = drawn(2, 5, SIZE)
    mask = padding_mask(np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]))
    module = made()
    first, second = run(module, x, mask), run(module, changed(x, np.s_[1, 2:], 99.0), mask)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1, :2], second[1, :2])


def test_padding_is_as_if_the_text_were_shorter():
    x = drawn(1, 5, SIZE)
    module = made()
    padded = run(module, x, padding_mask(np.array([[1, 1, 1, 0, 0]])))
    np.testing.assert_allclose(padded[:, :3], run(module, x[:, :3], None), atol=1e-6)


def test_row_of_nothing_but_padding_is_finite():
    x = drawn(2, 4, SIZE)
    module = made()
    given = run(module, x, padding_mask(np.array([[1, 1, 1, 1], [0, 0, 0, 0]])))
    assert np.isfinite(given).all()
    # transformers gives the mean of all values there
    mean = nnx.jit(lambda module, x: module.o_proj(module.v_proj(x).mean(axis=0)))(module, x[1])
    np.testing.assert_allclose(given[1], np.broadcast_to(mean, given[1].shape), atol=1e-6)


def test_token_sees_itself_and_what_is_before():
    x = drawn(1, 6, SIZE)
    module = made()
    first, second = (run(module, value, causal_mask(6)) for value in (x, changed(x, np.s_[0, 3], 5.0)))
    np.testing.assert_array_equal(first[0, :3], second[0, :3])
    assert (np.abs(first[0, 3:] - second[0, 3:]).max(axis=-1) > 0).all()


def test_causal_mask_also_hides_padding():
    mask = causal_mask(3, attention_mask_BS=np.array([[0, 1, 1]]))
    assert mask[0, 0].tolist() == [[False, False, False], [False, True, False], [False, True, True]]


def test_no_mask_means_no_padding():
    assert padding_mask(None) is None


def test_only_the_named_projections_have_a_bias():
    module = nnx.eval_shape(lambda: attention("qvo"))
    assert [getattr(module, f"{name}_proj").bias is not None for name in "qkvo"] == [True, False, True, True]
