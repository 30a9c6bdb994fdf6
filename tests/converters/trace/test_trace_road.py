"""A checkpoint without a family is converted by tracing, and runs where torch cannot be imported."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import save_file

from converters.conversion import convert
from converters.flax_source import FlaxSource
from converters.readers import open_source
from converters.trace.model import traceable_model
from converters.trace.road import trace_checkpoint
from pipeline.errors import ArtifactError, ConversionError
from pipeline.models.checkpoint import load_model, model_leaves
from pipeline.models.module_file import BATCH, InputSpec, ModuleFile
from pipeline.models.registry import describe

RUN_ERROR = 2e-6
"""Relative. Seen: 4e-8."""
FACTORY = '''
import torch
from torch import nn


class Net(nn.Module):
    """Uses a buffer of integers, a tied head, a counter, and a mask that no checkpoint holds."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, stride=2)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.embedding = nn.Embedding(13, width)
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(13) * 2)
        self.register_buffer("mask", torch.tril(torch.ones(200, 200)), persistent=False)

    def forward(self, image, token):
        x = self.norm(self.conv(image)).relu().mean((2, 3))
        for block in self.blocks:
            x = x + block(x).relu()
        x = x + self.embedding(self.table[token] // 2)
        return {"logits": self.head(x * self.mask[token].sum(-1, keepdim=True))}


def build(width=8):
    return Net(width)
'''
INPUTS = {
    "image": InputSpec(shape=(BATCH, 3, "height", "width"), dtype="float32"),
    "token": InputSpec(shape=(BATCH,), dtype="int64"),
}


@pytest.fixture
def project(tmp_path: Path):
    """A project with a factory, and the checkpoint of what it makes; gives the root and the module."""
    name = f"road_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    sys.path.insert(0, str(tmp_path))
    torch.manual_seed(3)
    module = __import__(name).build(width=6).eval()
    module.norm.running_mean.normal_()
    module.norm.num_batches_tracked.fill_(17)
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    ModuleFile(factory=f"{name}:build", arguments={"width": 6}, inputs=INPUTS).write(directory)
    save_file({key: value.clone() for key, value in module.state_dict().items()}, directory / "model.safetensors")
    yield tmp_path, module
    sys.path.remove(str(tmp_path))
    sys.modules.pop(name, None)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from pathlib import Path
import numpy as np
from flax import nnx
from pipeline.models.checkpoint import load_model
from pipeline.models.registry import describe
directory, inputs, outputs = map(Path, sys.argv[1:])
described, module = describe(directory), load_model(directory, dtype=None)
found = nnx.jit(described.forward)(module, dict(np.load(inputs)))
np.savez(outputs, **{name: np.asarray(value) for name, value in found.items()})
"""


def test_what_was_traced_runs_without_torch(project, tmp_path: Path) -> None:
    root, module = project
    convert(root / "checkpoint", to=root / "flax", project_root=root)
    image, token = torch.randn(3, 3, 9, 11), torch.tensor([1, 5, 12])
    np.savez(tmp_path / "inputs.npz", image=image.numpy(), token=token.numpy())
    arguments = [str(root / "flax"), str(tmp_path / "inputs.npz"), str(tmp_path / "outputs.npz")]
    environment = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = np.load(tmp_path / "outputs.npz")["logits"]
    wanted = module(image, token)["logits"].detach().numpy()
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < RUN_ERROR


def test_every_tensor_is_a_leaf_a_tie_or_carried(project) -> None:
    root, module = project
    source = open_source(root / "checkpoint")
    road = trace_checkpoint(source.directory, source.headers, project_root=root)
    state = set(module.state_dict())
    ties = {tie.tensor: tie.same_as for tie in road.table.ties}
    assert ties == {"head.weight": "embedding.weight"}
    assert set(road.program.leaves) | set(ties) | set(road.table.carried) == state
    assert road.table.carried == ("norm.num_batches_tracked",)
    assert set(road.constants) == {"mask"}
    assert road.table.blocks == (("blocks.0", "blocks.0"), ("blocks.1", "blocks.1"))
    assert road.program.inputs["image"].shape == ("batch", 3, "height", "width")
    assert road.warnings == ()


def test_leaves_are_the_checkpoints_bytes(project) -> None:
    root, module = project
    manifest = convert(root / "checkpoint", to=root / "flax", project_root=root)
    leaves = model_leaves(load_model(root / "flax", dtype=None))
    for name, value in module.state_dict().items():
        if name in leaves:
            assert np.array_equal(leaves[name], value.numpy()), name
    assert manifest.family == "traced"
    assert "embedding.weight" in leaves
    assert "head.weight" not in leaves


def test_a_size_that_the_module_fixes_is_reported(project) -> None:
    root, _ = project
    name = next(root.glob("road_*.py")).stem
    text = FACTORY.replace("        return {", "        x = x + len(range(image.shape[3]))\n        return {")
    (root / f"{name}_fixed.py").write_text(text)
    raw = json.loads((root / "checkpoint" / "module.json").read_text())
    (root / "checkpoint" / "module.json").write_text(json.dumps({**raw, "factory": f"{name}_fixed:build"}))
    source = open_source(root / "checkpoint")
    road = trace_checkpoint(source.directory, source.headers, project_root=root)
    fixed = road.program.inputs["image"].shape[3]
    assert isinstance(fixed, int)
    assert road.warnings == (f"input image: the module fixes width at {fixed}",)
    assert road.program.inputs["image"].shape == ("batch", 3, "height", fixed)


def test_the_batch_stays_open_where_export_takes_no_other_size_open(project) -> None:
    root, _ = project
    name = next(root.glob("road_*.py")).stem
    text = FACTORY.replace(
        "        return {", "        assert int(image.shape[2]) * image.shape[3] == 45\n        return {"
    )
    (root / f"{name}_rows.py").write_text(text)
    raw = json.loads((root / "checkpoint" / "module.json").read_text())
    (root / "checkpoint" / "module.json").write_text(json.dumps({**raw, "factory": f"{name}_rows:build"}))
    source = open_source(root / "checkpoint")
    road = trace_checkpoint(source.directory, source.headers, project_root=root)
    assert road.program.inputs["image"].shape == ("batch", 3, 9, 5)
    assert len(road.warnings) == 2


@pytest.mark.slow
def test_a_transformers_checkpoint_keeps_its_dtype_and_its_kind(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=101, n_embd=48, n_layer=1, n_head=8, n_positions=32, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "checkpoint")
    convert(tmp_path / "checkpoint", to=tmp_path / "flax", via="trace")
    described = describe(tmp_path / "flax")
    assert (described.kind, described.name) == ("causal-lm", "traced")
    assert described.program.dtype == "bfloat16"
    inputs = described.example_inputs(seed=0)
    ids, mask = (torch.from_numpy(inputs[name]).long() for name in ("input_ids", "attention_mask"))
    for dtype, limit in ((None, 2e-2), ("float32", RUN_ERROR)):  # bfloat16 keeps eight bits
        module = load_model(tmp_path / "flax", dtype=dtype)
        found = np.asarray(nnx.jit(described.forward)(module, inputs)["logits"], np.float32)
        reference = model if dtype is None else model.float()
        wanted = reference(input_ids=ids, attention_mask=mask).logits.float().detach().numpy()
        assert np.abs(found - wanted).max() / np.abs(wanted).max() < limit


def test_a_directory_without_a_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"neither module.json nor config.json"):
        traceable_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            {"model_type": "gpt2", "architectures": ["NoSuchModel"]},
            "architectures is \\['NoSuchModel'\\]",
        ),
        ({"model_type": "no-such", "architectures": ["GPT2Model"]}, "transformers cannot build GPT2Model"),
    ],
)
def test_a_config_that_transformers_lacks_is_refused(tmp_path: Path, config: dict, complaint: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=complaint):
        traceable_model(tmp_path)


def test_a_base_models_checkpoint_fills_a_model_with_a_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=101, n_embd=48, n_layer=1, n_head=8, n_positions=32, eos_token_id=0)
    base = transformers.GPT2Model(config)
    base.save_pretrained(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["GPT2LMHeadModel"]}))
    convert(tmp_path / "checkpoint", to=tmp_path / "flax", via="trace")
    leaves = model_leaves(load_model(tmp_path / "flax", dtype=None))
    assert np.array_equal(leaves["transformer.h.0.attn.c_attn.weight"], base.h[0].attn.c_attn.weight.detach())
    back = FlaxSource(tmp_path / "flax")
    assert np.array_equal(back.read("h.0.attn.c_attn.weight"), base.h[0].attn.c_attn.weight.detach())


@pytest.mark.slow
def test_layouts_that_transformers_changes_between_file_and_module_are_refused(tmp_path: Path) -> None:
    config = transformers.OlmoeConfig(
        vocab_size=101, hidden_size=48, intermediate_size=24, num_hidden_layers=1, num_attention_heads=8, num_experts=4,
        num_key_value_heads=2, num_experts_per_tok=2, eos_token_id=0,
    )  # fmt: skip
    transformers.OlmoeForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(ConversionError) as refused:
        convert(tmp_path / "checkpoint", to=tmp_path / "flax", via="trace")
    assert "OlmoeForCausalLM: transformers keeps 12 tensors in another layout than the module" in str(refused.value)
    assert "model.layers.0.mlp.experts.0.gate_proj.weight: is part of model.layers.0.mlp.experts.gate_up_proj" in str(
        refused.value
    )
    transformers.OlmoeForCausalLM(config).save_pretrained(tmp_path / "plain", save_original_format=False)
    convert(tmp_path / "plain", to=tmp_path / "flax", via="trace")
    assert describe(tmp_path / "flax").kind == "causal-lm"
