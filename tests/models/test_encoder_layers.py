"""Flax layers compute what torch's do, constants and all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.activations import ACT2FN

from pipeline.models.encoders.activations import ACTIVATION_BY_NAME
from pipeline.models.encoders.config_fields import ACTIVATIONS
from pipeline.models.encoders.layers import BatchNorm, Embedding, channels_first, channels_last, convolution, layer_norm

# Sums of a few dozen float32 products; measured below 1e-6.
TOLERANCE = 2e-6
GRID = np.linspace(-6, 6, 1201, dtype=np.float32)


def conv_of(kernel, *, stride=1, padding=0, groups=1):
    spatial = kernel.shape[:-2]
    layer = nnx.eval_shape(
        lambda: convolution(
            kernel.shape[-2] * groups,
            kernel.shape[-1],
            kernel=spatial,
            stride=(stride,) * len(spatial),
            padding=padding,
            groups=groups,
            use_bias=False,
            rngs=nnx.Rngs(0),
        )
    )
    layer.kernel.set_value(jnp.asarray(kernel, jnp.float32))
    return layer


def test_image_kernel_is_not_turned():
    torch_kernel = np.array([[[[1, 2], [3, 4]]]], np.float32)
    pixels = np.array([[[[0, 1], [0, 0]]]], np.float32)
    layer = conv_of(torch_kernel.transpose(2, 3, 1, 0))
    assert float(layer(channels_last(pixels, into=layer))[0, 0, 0, 0]) == 2.0  # 3 with height and width exchanged


@pytest.mark.parametrize(("stride", "padding", "groups"), [(1, 0, 1), (2, 1, 1), (1, 3, 4)])
def test_image_convolution_is_torchs(stride, padding, groups):
    torch.manual_seed(0)
    theirs = torch.nn.Conv2d(4, 8, (3, 5), stride=stride, padding=padding, groups=groups, bias=False)
    pixels = torch.randn(2, 4, 11, 13)
    layer = conv_of(theirs.weight.detach().numpy().transpose(2, 3, 1, 0), stride=stride, padding=padding, groups=groups)
    ours = channels_first(layer(channels_last(pixels.numpy(), into=layer)))
    np.testing.assert_allclose(ours, theirs(pixels).detach(), atol=TOLERANCE)


def test_sound_convolution_is_torchs():
    torch.manual_seed(0)
    theirs = torch.nn.Conv1d(5, 6, 3, stride=2, padding=1, bias=False)
    sound = torch.randn(2, 5, 12)
    layer = conv_of(theirs.weight.detach().numpy().transpose(2, 1, 0), stride=2, padding=1)
    ours = channels_first(layer(channels_last(sound.numpy(), into=layer)))
    np.testing.assert_allclose(ours, theirs(sound).detach(), atol=TOLERANCE)


def test_flattened_images_keep_torchs_order():
    pixels = np.array([[[[0.0, 1.0]], [[0.0, 0.0]]]], np.float32)  # two channels, one row, two columns
    inside = channels_last(pixels, into=conv_of(np.ones((1, 1, 2, 2))))
    weights = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    assert float(channels_first(inside).reshape(-1) @ weights) == 2.0
    assert float(inside.reshape(-1) @ weights) == 3.0  # what forgetting the order would give


@pytest.mark.parametrize(("eps", "expected"), [(1e-5, 0.3015), (1e-6, 0.7071), (1e-12, 1.0)])
def test_layer_norm_takes_its_eps(eps, expected):
    norm = layer_norm(2, eps=eps, rngs=nnx.Rngs(0))
    assert norm(jnp.array([0.001, -0.001])) == pytest.approx([expected, -expected], abs=1e-4)


def test_layer_norm_keeps_the_variance_of_values_far_from_zero():
    values = torch.tensor([[1000.0, 1000.5, 1001.0, 999.0]])
    ours = layer_norm(4, eps=1e-5, rngs=nnx.Rngs(0))(values.numpy())
    np.testing.assert_allclose(ours, torch.nn.functional.layer_norm(values, (4,)), atol=1e-4)


def test_batch_norm_uses_the_stored_statistics():
    norm = BatchNorm(1, eps=1e-5, torch_momentum=0.1)
    norm.mean[...], norm.var[...] = jnp.array([2.0]), jnp.array([4.0])
    assert float(norm(jnp.full((1, 1, 1, 1), 4.0))[0, 0, 0, 0]) == pytest.approx(0.9999988, abs=1e-7)


def test_batch_norm_begins_in_evaluation_and_keeps_torchs_momentum():
    norm = BatchNorm(3, eps=1e-5, torch_momentum=0.1)
    assert norm.use_running_average
    assert norm.momentum == pytest.approx(0.9)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 3, 1, 2)], ids=["usual", "two numbers a channel"])
def test_batch_norm_trains_as_torchs(shape):
    torch.manual_seed(0)
    theirs = torch.nn.BatchNorm2d(3, momentum=0.3, eps=1e-3).train()
    ours = BatchNorm(3, eps=1e-3, torch_momentum=0.3)
    ours.train()
    with torch.no_grad():
        theirs.weight.copy_(torch.rand(3) + 0.5), theirs.bias.copy_(torch.randn(3))
    ours.scale[...], ours.bias[...] = jnp.asarray(theirs.weight.detach()), jnp.asarray(theirs.bias.detach())
    for _ in range(3):
        pixels = torch.randn(shape) * 2 + 1
        given = ours(jnp.moveaxis(jnp.asarray(pixels.numpy()), 1, -1))
        np.testing.assert_allclose(channels_first(given), theirs(pixels).detach(), atol=2e-5)
    np.testing.assert_allclose(ours.mean[...], theirs.running_mean, atol=TOLERANCE)
    np.testing.assert_allclose(ours.var[...], theirs.running_var, atol=2e-5)


def test_batch_norm_in_evaluation_changes_nothing():
    norm = BatchNorm(2, eps=1e-5, torch_momentum=0.1)
    norm(jnp.ones((2, 3, 3, 2)) * 7)
    assert norm.mean[...].tolist() == [0.0, 0.0]
    assert norm.var[...].tolist() == [1.0, 1.0]


def test_embedding_answers_in_its_stored_dtype():
    table = Embedding(5, 3, rngs=nnx.Rngs(0))
    table.embedding.set_value(table.embedding[...].astype(jnp.bfloat16))
    assert table(jnp.array([1, 2])).dtype == jnp.bfloat16


def test_every_activation_that_a_config_may_name_exists():
    assert set(ACTIVATIONS) == set(ACTIVATION_BY_NAME)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_transformers(name):
    ours = jax.jit(ACTIVATION_BY_NAME[name])(GRID)
    np.testing.assert_allclose(ours, ACT2FN[name](torch.from_numpy(GRID)), atol=TOLERANCE)


def test_the_two_gelus_are_told_apart():
    exact, approximate = (np.asarray(ACTIVATION_BY_NAME[name](GRID)) for name in ("gelu", "gelu_new"))
    assert 1e-4 < np.abs(exact - approximate).max() < 1e-3
