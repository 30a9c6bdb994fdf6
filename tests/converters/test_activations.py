"""What modules of both frameworks give, inside and out, by the names of their users."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from converters.flax_activations import FlaxRunner
from converters.torch_activations import precise_activations, torch_outputs, watching
from pipeline.models.description import ModelKind
from pipeline.models.variables import tap


class Shortcut(torch.nn.Module):
    """Adds its input to the output of a submodule in place, and runs another one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.twice = torch.nn.Tanh()

    def forward(self, x, mask=None):
        y = self.first(x)
        y += x
        return {"hidden": self.twice(self.twice(y)), "count": torch.tensor(3), "cache": (y,)}


def test_outputs_have_the_names_that_torch_gives_them():
    x = np.ones((2, 3), np.float32)
    assert list(torch_outputs(Shortcut(), {"x": x})) == ["hidden"]
    assert list(torch_outputs(torch.nn.Linear(3, 5), {"input": x})) == ["output"]

    class Pair(torch.nn.Module):
        def forward(self, x):
            return x + 1, None, x.double()

    found = torch_outputs(Pair(), {"x": x})
    assert {name: value.dtype for name, value in found.items()} == {"output_0": np.float32, "output_2": np.float32}


def test_tokens_reach_torch_as_it_counts_them():
    class Lookup(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(7, 2)

        def forward(self, input_ids):
            assert input_ids.dtype == torch.int64
            return self.table(input_ids)

    assert torch_outputs(Lookup(), {"input_ids": np.array([[1, 6]], np.int32)})["output"].shape == (1, 2, 2)


def test_a_submodule_is_seen_as_it_was_when_it_ran():
    model = Shortcut()
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with watching(model, ["first", "twice"]) as seen:
        outputs = torch_outputs(model, {"x": x})
    assert np.array_equal(seen["first"], model.first(torch.from_numpy(x)).detach().numpy())
    assert np.array_equal(seen["twice"], outputs["hidden"])
    assert not model.first._forward_hooks
    with pytest.raises(AttributeError, match="absent"), watching(model, ["absent"]):
        pass


class Doubling(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.array(2.0))

    def __call__(self, x):
        x = tap("zeta", x * self.scale[...])
        return tap("alpha", x + 1)


class DoublingModel:
    kind, name = ModelKind.PREDICTOR, "doubling"

    def __init__(self) -> None:
        self.num_traces = 0

    def forward(self, module, inputs):
        self.num_traces += 1
        return {"output": module(inputs["x"]).astype(jnp.bfloat16)}


def test_taps_come_in_the_order_in_which_modules_ran():
    description = DoublingModel()
    runner = FlaxRunner(description, Doubling())
    inputs = {"x": np.array([1.0, 2.0], np.float32)}
    outputs, taps = runner.outputs_and_taps(inputs)
    assert list(taps) == ["zeta", "alpha"]
    assert taps["zeta"].tolist() == [2.0, 4.0]
    assert outputs["output"].tolist() == runner.outputs(inputs)["output"].tolist() == [3.0, 5.0]
    assert outputs["output"].dtype == np.float32
    again, _ = runner.outputs_and_taps(inputs)
    assert again["output"].tolist() == [3.0, 5.0]
    assert description.num_traces == 2, "compiled once with taps and once without"


def test_float64_activations_are_exact_and_leave_the_module_in_float32():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    x = np.array([[0.1, -0.7, 1.3]], np.float32)
    found = precise_activations(module, {"input": x}, ["0", "1"])
    weight, bias = (before[name].double().numpy() for name in ("0.weight", "0.bias"))
    np.testing.assert_allclose(found["1"], np.tanh(x.astype(np.float64) @ weight.T + bias), rtol=1e-14)
    assert {name: value.dtype for name, value in module.state_dict().items()} == dict.fromkeys(before, torch.float32)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_module_that_only_runs_in_float32_has_no_exact_activations():
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(x.float())

    assert precise_activations(Mixed(), {"x": np.ones((1, 3), np.float32)}, ["inner"]) is None
