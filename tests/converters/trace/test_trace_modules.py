"""Whole torch modules, traced at one size and run at others."""

from typing import Any

import pytest
import torch
from torch import nn
from tracing import pair

MODULE_ERROR = 2e-6
"""Relative. Seen: 3e-7 for the deepest of these modules."""
BATCH = {0: "batch"}
SEQUENCE = {0: "batch", 1: "time"}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def test_a_perceptron_runs_at_any_batch() -> None:
    module = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).eval()
    made = pair(module, torch.randn(2, 5), dynamic={"input": BATCH})
    for rows in (1, 2, 6):
        assert made.error(torch.randn(rows, 5)) < MODULE_ERROR


def test_a_convolution_before_a_linear_layer_keeps_torchs_order_of_channels() -> None:
    # Two channels of one by two, flattened channel first: 1*0 + 2*1 + 3*0 + 4*0 = 2; channels last would give 3.
    module = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Flatten(), nn.Linear(4, 1, bias=False)).eval()
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([1.0, 0.0]).reshape(2, 1, 1, 1))
        module[2].weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    made = pair(module, torch.tensor([[[[0.0, 1.0]]]]))
    assert float(made.module(torch.tensor([[[[0.0, 1.0]]]]).numpy())[0, 0]) == 2


def test_a_transposed_convolution_is_not_a_flipped_one() -> None:
    module = nn.ConvTranspose1d(1, 1, 2, bias=False).eval()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[[1.0, 2.0]]]))
    found = pair(module, torch.tensor([[[1.0, 0.0]]])).module(torch.tensor([[[1.0, 0.0]]]).numpy())
    assert found.tolist() == [[[1.0, 2.0, 0.0]]]


def test_batch_norm_uses_its_running_statistics_and_eps() -> None:
    module = nn.BatchNorm1d(1).eval()
    module.running_mean.fill_(2.0)
    module.running_var.fill_(4.0)
    found = pair(module, torch.tensor([[4.0], [2.0]])).module(torch.tensor([[4.0], [2.0]]).numpy())
    assert float(found[0, 0]) == pytest.approx(0.9999988, abs=1e-7)


def test_batch_norm_without_running_statistics_uses_the_batchs_own() -> None:
    module = nn.BatchNorm2d(3, track_running_stats=False).eval()
    assert pair(module, torch.randn(4, 3, 5, 2)).error(torch.randn(4, 3, 5, 2) * 3 + 1) < MODULE_ERROR


def test_a_network_of_convolutions_runs_at_any_batch() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)
    ).eval()
    module[1].running_mean.normal_()
    module[1].running_var.uniform_(0.5, 2)
    made = pair(module, torch.randn(2, 3, 8, 6), dynamic={"input": BATCH})
    assert made.error(torch.randn(5, 3, 8, 6)) < MODULE_ERROR


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(5, 7, 2, batch_first=True, bidirectional=True),
        nn.LSTM(5, 7, batch_first=True, proj_size=3),
        nn.GRU(5, 7, 2, bias=False, batch_first=True),
        nn.RNN(5, 7, nonlinearity="relu", batch_first=True),
    ],
    ids=["lstm", "lstm with projection", "gru", "rnn"],
)
def test_recurrent_layers_run_at_any_length(module: nn.Module) -> None:
    made = pair(module, torch.randn(2, 9, 5), dynamic={"input": SEQUENCE})
    assert made.trace.program.inputs["input"].shape == ("batch", "time", 5)
    assert made.error(torch.randn(3, 4, 5)) < MODULE_ERROR


def test_recurrent_modules_are_torchs_own_again_after_a_trace() -> None:
    pair(nn.LSTM(5, 7), torch.randn(9, 2, 5))
    lengths = torch.tensor([4, 2])
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 2, 5), lengths)
    assert nn.LSTM(5, 7)(packed)[0].data.shape == (6, 7)


def test_a_transformer_encoder_layer_runs_at_any_size_with_padding() -> None:
    module = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval()
    masks = {"src_key_padding_mask": torch.tensor([[False] * 9, [False] * 6 + [True] * 3])}
    made = pair(module, torch.randn(2, 9, 16), dynamic={"src": SEQUENCE, "src_key_padding_mask": SEQUENCE}, **masks)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True], [False, False, True, True, True]])
    assert made.error(torch.randn(3, 5, 16), src_key_padding_mask=padding) < MODULE_ERROR


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def test_tied_parameters_are_one_variable_with_both_gradients() -> None:
    made = pair(Tied(), torch.randint(0, 11, (2, 5)), dynamic={"ids": SEQUENCE})
    assert made.trace.program.leaves["embedding.weight"].aliases == ("head.weight",)
    assert list(made.trace.program.leaves) == ["embedding.weight"]
    assert made.error(torch.randint(0, 11, (3, 4))) < MODULE_ERROR


def test_a_tied_parameter_goes_by_the_name_that_the_checkpoint_has() -> None:
    made = pair(Tied(), torch.randint(0, 11, (2, 5)), names=("head.weight",))
    assert list(made.trace.program.leaves) == ["head.weight"]
    assert made.error(torch.randint(0, 11, (2, 5))) < MODULE_ERROR


class Trees(nn.Module):
    def forward(self, x: Any, y: Any = None, *, z: Any, scale: float = 2.0) -> Any:
        return {"a": x["u"] + z[0], "b": (x["v"][0] * scale, [z[1]])}


def test_inputs_and_outputs_keep_torchs_trees() -> None:
    tensors = [torch.randn(2, 3) for _ in range(4)]
    made = pair(Trees(), {"u": tensors[0], "v": [tensors[1]]}, z=tensors[2:], scale=3.0)
    u, v, *z = (tensor.numpy() for tensor in tensors)
    found = made.module({"u": u, "v": [v]}, z=z, scale=3.0)
    assert set(found) == {"a", "b"}
    assert isinstance(found["b"], tuple)
    assert isinstance(found["b"][1], list)
    assert made.described.forward(made.module, {"x.u": u, "x.v.0": v, "z.0": z[0], "z.1": z[1]}).keys() == {
        "a",
        "b.0",
        "b.1.0",
    }


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(20) * 3)
        self.register_buffer("unsaved", torch.randn(20), persistent=False)
        self.register_buffer("large", torch.randn(100, 100), persistent=False)
        self.plain = torch.randn(3)

    def forward(self, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.table[i], self.unsaved[i], self.large[i], self.plain * 2


def test_what_a_checkpoint_does_not_hold_goes_with_the_program() -> None:
    made = pair(Buffers(), torch.tensor([3, 1, 19]))
    assert list(made.trace.program.leaves) == ["table"]
    assert set(made.trace.constants) == {"unsaved", "large", "plain"}
    assert made.error(torch.tensor([7, 0, 2])) == 0


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.layer(x), lambda x: x - 1, (x,))


def test_both_branches_of_a_condition_are_there() -> None:
    made = pair(Branches(), torch.randn(2, 3))
    assert made.error(torch.rand(2, 3)) < MODULE_ERROR
    assert made.error(-torch.rand(2, 3)) == 0


class NestedBranches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def above(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 30, lambda x: x * 2, lambda x: x * 3, (x,))

        def below(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() < -30, lambda x: x * 4, lambda x: x * 5, (x,))

        return torch.cond(x.sum() > 0, above, below, (x,))


def test_branches_inside_branches_are_their_own() -> None:
    made = pair(NestedBranches(), torch.randn(2, 3))
    assert len(made.trace.program.graphs) == 6
    for value in (9.0, 1.0, -1.0, -9.0):
        assert made.error(torch.full((2, 3), value)) == 0


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        def goes_on(i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return i < 5

        def body(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, x * 1.5 + i

        return torch._higher_order_ops.while_loop(goes_on, body, (torch.tensor(0), x))


def test_a_loop_runs_until_its_condition_fails() -> None:
    assert pair(Loop(), torch.randn(2, 3)).error(torch.randn(2, 3)) < MODULE_ERROR


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        row = y[0]
        row.mul_(2)
        y[:, ::2] += x[:, ::2]
        return y


def test_writes_through_views_reach_the_whole_tensor() -> None:
    assert pair(InPlace(), torch.randn(3, 4)).error(torch.randn(3, 4)) == 0
