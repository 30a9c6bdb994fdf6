"""A traced module is an NNX module like any other: jit, grad, vmap, sharding, rngs, and clear refusals."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from tracing import Pair, pair, relative_error

from pipeline.errors import ConversionError, ParameterError
from pipeline.models.checkpoint import model_leaves
from pipeline.models.variables import recording

RUN_ERROR = 2e-6
"""Relative. Seen: 3e-7."""
GRADIENT_ERROR = 1e-5
"""Seen: 1e-6."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(6)


def perceptron() -> Pair:
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).eval()
    return pair(module, torch.randn(2, 5), dynamic={"input": {0: "batch"}})


def test_gradients_of_parameters_are_torchs() -> None:
    made, x = perceptron(), torch.randn(4, 5)
    made.torch_module(x).square().sum().backward()
    gradients = nnx.grad(lambda module, x: jnp.sum(jnp.square(module(x))))(made.module, x.numpy())
    ours = model_leaves_of(gradients)
    for name, parameter in made.torch_module.named_parameters():
        assert relative_error(parameter.grad, ours[name]) < GRADIENT_ERROR


def model_leaves_of(state: nnx.State) -> dict[str, jax.Array]:
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def test_leaf_paths_are_torchs_names() -> None:
    made = perceptron()
    assert set(model_leaves(made.module)) == set(made.torch_module.state_dict())


def test_torch_names_may_be_those_of_nnx_methods() -> None:
    module = nn.Sequential()
    module.add_module("sow", nn.Linear(3, 3))
    module.add_module("perturb", nn.Sequential(nn.Linear(3, 2)))
    made = pair(module.eval(), torch.randn(2, 3))
    assert set(model_leaves(made.module)) == set(module.state_dict())
    assert made.error(torch.randn(2, 3)) < RUN_ERROR


def test_it_maps_over_a_further_axis() -> None:
    made, x = perceptron(), torch.randn(6, 4, 5)
    found = nnx.vmap(lambda module, x: module(x), in_axes=(None, 0))(made.module, x.numpy())
    assert relative_error(made.torch_module(x), found) < RUN_ERROR


def test_two_loads_of_one_program_share_a_compiled_function() -> None:
    first, second = perceptron(), perceptron()
    graph = nnx.split(first.module)[0]
    assert graph == nnx.split(second.module)[0]
    assert hash(graph) == hash(nnx.split(second.module)[0])


@pytest.mark.slow
def test_its_leaves_are_sharded_over_two_devices() -> None:
    script = """
import jax, numpy as np, torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from flax import nnx
from torch import nn
from converters.trace.export import trace_module
from pipeline.models.traced.description import TracedModel
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
trace = trace_module(module, args=(torch.randn(2, 5),), dynamic={"input": {0: "batch"}})
described = TracedModel(program=trace.program, constants=trace.constants)
made = described.module({name: value.numpy() for name, value in module.state_dict().items()})
mesh = Mesh(np.array(jax.devices()), ("model",))
graph, state = nnx.split(made)
state = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P("model"))), state)
x = torch.randn(3, 5)
found = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x.numpy())
assert len(jax.devices()) == 2
assert len(state["0"]["weight"].get_value().sharding.device_set) == 2
assert np.abs(module(x).detach().numpy() - np.asarray(found)).max() < 1e-6
"""
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**_environment(), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "HOME": "/tmp"}


def test_dropout_draws_from_the_rngs_of_the_call() -> None:
    made = pair(nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.4)).train(), torch.randn(8, 5))
    x = np.ones((8, 5), np.float32)
    first, again, other = (made.module(x, rngs=nnx.Rngs(seed)) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert 0.3 < float((first == 0).mean()) < 0.5
    dense = np.asarray(made.torch_module.eval()(torch.ones(8, 5)).detach())
    kept = np.asarray(first) != 0
    assert np.allclose(np.asarray(first)[kept] * 0.6, dense[kept], rtol=1e-5)


def test_stored_rngs_move_on_with_every_call() -> None:
    made = pair(nn.Dropout(0.5).train(), torch.randn(4, 50), rngs=nnx.Rngs(3))
    x = np.ones((4, 50), np.float32)
    assert not np.array_equal(made.module(x), made.module(x))


def test_random_operations_without_rngs_are_refused() -> None:
    made = pair(nn.Dropout(0.5).train(), torch.randn(4, 50))
    with pytest.raises(ParameterError, match=r"was given no rngs[\s\S]*rngs=nnx.Rngs"):
        made.module(np.ones((4, 50), np.float32))


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.rand_like(x),
            torch.randn(2000),
            torch.randint(3, 7, (500,)),
            torch.bernoulli(torch.full((2000,), 0.2)),
            torch.multinomial(torch.tensor([0.1, 0.0, 0.9]), 400, replacement=True),
            torch.randperm(20),
        )


def test_draws_have_torchs_distributions() -> None:
    made = pair(Draws(), torch.randn(40, 50))
    uniform, normal, whole, coin, drawn, order = nnx.jit(lambda m, x, r: m(x, rngs=r))(
        made.module, np.zeros((40, 50), np.float32), nnx.Rngs(0)
    )
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(normal.mean()) == pytest.approx(0, abs=0.1)
    assert float(normal.std()) == pytest.approx(1, abs=0.1)
    assert set(np.asarray(whole).tolist()) == {3, 4, 5, 6}
    assert float(coin.mean()) == pytest.approx(0.2, abs=0.05)
    assert set(np.asarray(drawn).tolist()) == {0, 2}
    assert sorted(np.asarray(order).tolist()) == list(range(20))


def test_training_writes_the_running_statistics_that_torch_writes() -> None:
    module = nn.Sequential(nn.Conv1d(3, 6, 2), nn.BatchNorm1d(6, momentum=0.3)).train()
    x = torch.randn(4, 3, 7)
    made = pair(module, x)
    found = nnx.jit(lambda module, x: module(x))(made.module, x.numpy())
    assert relative_error(module(x), found) < RUN_ERROR
    ours = model_leaves(made.module)
    for name, buffer in module.named_buffers():
        assert relative_error(buffer, ours[name]) < RUN_ERROR, name


def test_blocks_are_tapped_where_a_hook_on_torch_sees_them() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 9, 16)
    seen: dict[str, torch.Tensor] = {}
    for name, block in module.layers.named_children():
        block.register_forward_hook(lambda _m, _i, output, name=f"layers.{name}": seen.update({name: output}))
    made = pair(module, x)
    module(x)
    with recording() as taps:
        made.module(x.numpy())
    assert list(taps) == list(seen) == ["layers.0", "layers.1"]
    for name, value in seen.items():
        assert relative_error(value, taps[name]) < RUN_ERROR


def test_calls_that_do_not_fit_are_refused_with_every_complaint() -> None:
    made = pair(
        nn.Bilinear(5, 4, 3),
        torch.randn(2, 5),
        torch.randn(2, 4),
        dynamic={"input1": {0: "batch"}, "input2": {0: "batch"}},
    )
    good = np.zeros((2, 5), np.float32)
    with pytest.raises(ParameterError) as refused:
        made.module(np.zeros((2, 6), np.float32), np.zeros((2, 4), np.int32), extra=good)
    text = str(refused.value)
    assert "input2: dtype int32, must be float32" in text
    assert "extra: the module was traced without it; allowed: input1, input2" in text
    with pytest.raises(ParameterError, match=r"input1: shape \(2, 6\), must be \(batch, 5\)"):
        made.module(np.zeros((2, 6), np.float32), np.zeros((2, 4), np.float32))
    with pytest.raises(ParameterError, match=r"input2: batch \(axis 0\) is 3, but 2 in input1"):
        made.module(good, np.zeros((3, 4), np.float32))
    with pytest.raises(ParameterError, match="input2: missing"):
        made.module(good)


def test_integers_beyond_32_bit_are_refused() -> None:
    made = pair(nn.Embedding(11, 3), torch.tensor([1, 2]))
    with pytest.raises(ParameterError, match="32 bit integers are computed with"):
        made.module(np.array([1, 2**40]))


class Hashes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2**40


def test_arithmetic_that_needs_64_bit_is_refused() -> None:
    made = pair(Hashes(), torch.tensor([1, 2]))
    with pytest.raises(ParameterError, match="1099511627776, which 32 bit cannot hold"):
        made.module(np.array([1, 2], np.int32))


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Unfold(), Unfold()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = layer(x)
        return x[x > 0].sum() + torch.nonzero(x).sum()


class Unfold(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.histc(x, 3).sum()


def test_all_unsupported_operations_are_listed_with_their_modules() -> None:
    with pytest.raises(ConversionError) as refused:
        pair(Refused(), torch.randn(3, 4))
    text = str(refused.value)
    assert "3 operations cannot be traced to JAX" in text
    assert "aten.histc.default x2 in inner.0, inner.1" in text
    assert "aten.index.Tensor (its size depends on values) x1 in the model itself" in text
    assert "aten.nonzero.default (its size depends on values) x1" in text


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_module_that_export_refuses_is_refused_in_torchs_words() -> None:
    with pytest.raises(ConversionError, match=r"Branching: torch.export refuses it:[\s\S]*strict=False:"):
        pair(Branching(), torch.randn(3))


def test_a_failing_operation_names_its_torch_module() -> None:
    made = perceptron()
    made.module.__getattribute__("2").weight.set_value(jnp.zeros((3, 6)))
    with pytest.raises(TypeError) as failed:
        made.module(np.zeros((2, 5), np.float32))
    assert any("aten.linear.default" in note and "module 2" in note for note in failed.value.__notes__)
