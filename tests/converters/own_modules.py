"""A torch module of a user's own and its checkpoint: convolution, batch norm with statistics, and a tied weight."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from pipeline.models.module_file import BATCH, InputSpec, ModuleFile

SOURCE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(2, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(width, 3)

    def forward(self, pixels, weights):
        hidden = torch.relu(self.norm(self.conv(pixels))).mean((2, 3)) * weights
        return {"logits": self.head(self.second(torch.tanh(self.first(hidden)))), "hidden": hidden}


def build(width):
    return Net(width)
"""


def write_own_checkpoint(project: Path, directory: Path, *, name: str) -> torch.nn.Module:
    """The module with random numbers; its code in `project`, its weights in `directory`."""
    project.mkdir(exist_ok=True)
    (project / f"{name}.py").write_text(SOURCE)
    namespace: dict = {}
    exec(SOURCE, namespace)
    torch.manual_seed(3)
    module = namespace["build"](7).eval()
    with torch.no_grad():
        for value in (*module.parameters(), module.norm.running_mean):
            value.copy_(torch.randn_like(value))
        module.norm.running_var.copy_(torch.rand(7) + 0.5)
        module.norm.num_batches_tracked.fill_(31)
    directory.mkdir()
    tensors = {key: value.clone() for key, value in module.state_dict().items() if key != "second.weight"}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    inputs = {
        "pixels": InputSpec(shape=(BATCH, 2, 6, 9), dtype="float32"),
        "weights": InputSpec(shape=(BATCH, 7), dtype="float32"),
    }
    ModuleFile(factory=f"{name}:build", arguments={"width": 7}, inputs=inputs).write(directory)
    return module
