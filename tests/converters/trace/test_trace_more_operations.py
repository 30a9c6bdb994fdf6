"""Operations and graphs that only the zoo of architectures showed to be needed."""

import torch
from comparing import value_differences

from converters.trace.export import export_module, lower

MORE = [
    "x.diff()",
    "x.diff(dim=0)",
    "x.diff(n=2)",
    "torch.diff(x, prepend=x[:, :1], append=2 * x[:, :2])",
    # A constant of a graph, indexed by what is computed.
    "torch.tensor([3.0, -1.0, 2.5, 0.5])[i.clamp(max=2)]",
    "torch.tensor([3.0, -1.0, 2.5, 0.5]).index_put((i[:, 0],), x[:, 0])",
]
INPUTS = {"x": torch.randn(3, 5), "i": torch.tensor([[0, 3], [2, 1], [1, 2]])}


def test_operations_that_few_models_use_are_torchs() -> None:
    assert value_differences(MORE, INPUTS) == []


class Normalized(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).relu()


class Added(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.add_(1)
        return y


def test_a_graph_that_writes_to_nothing_stays_as_it_was_exported() -> None:
    exported = export_module(Normalized().eval(), args=(torch.randn(3, 4),), kwargs={}, dynamic={})
    assert lower(exported) is exported


def test_a_graph_that_writes_is_made_functional() -> None:
    for module in (Normalized().train(), Added()):
        exported = export_module(module, args=(torch.randn(3, 4),), kwargs={}, dynamic={})
        lowered = lower(exported)
        assert lowered is not exported
        names = [str(node.target) for node in lowered.graph.nodes if node.op == "call_function"]
        assert not any("add_." in name for name in names)
