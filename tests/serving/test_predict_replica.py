"""A torch module of a user's own, converted by tracing, is served from its directory and gives what torch gives."""

import importlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from starlette.testclient import TestClient

from converters.conversion import convert
from pipeline.errors import ParameterError
from pipeline.models.checkpoint import load_model
from pipeline.models.description import ModelKind
from pipeline.models.module_file import InputSpec, ModuleFile
from pipeline.serving.hosting.replica import Replica, serve
from pipeline.serving.hosting.served_model import LoadedModel
from pipeline.serving.replica_settings import ReplicaSettings

SOURCE = """
from torch import nn


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.memory = nn.GRU(6, 5, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(5, 3)

    def forward(self, image, flags, index, x):
        hidden = self.words(index).mean(1) + image.float().mean((1, 2))[:, None] / 255
        hidden = self.norm(hidden + flags.float().sum(1, keepdim=True) + x)
        out, _ = self.memory(hidden[:, None].repeat(1, 4, 1))
        return {"logits": self.head(self.dropout(out[:, -1])), "hidden": hidden}
"""
INPUTS = {"image": ((4, 5), "uint8"), "flags": ((3,), "bool"), "index": ((2,), "int64"), "x": ((6,), "float32")}
TOLERANCE = 2e-6
"""Absolute, of outputs around 1; seen 5e-8 for logits."""


def draw(num: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (num, 4, 5)).astype(np.uint8),
        "flags": rng.integers(0, 2, (num, 3)).astype(bool),
        "index": rng.integers(0, 11, (num, 2)),
        "x": rng.normal(size=(num, 6)).astype(np.float32),
    }


def as_torch(arrays):
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The torch module in evaluation mode, and a client of its replica."""
    root = tmp_path_factory.mktemp("own")
    (root / "mixed_own_module.py").write_text(SOURCE)
    sys.path.insert(0, str(root))
    torch.manual_seed(0)
    module = importlib.import_module("mixed_own_module").Mixed()
    module(**as_torch(draw(16)))  # running statistics that are not those of the start
    checkpoint = root / "checkpoint"
    checkpoint.mkdir()
    dcp.save({"model": module.state_dict()}, checkpoint_id=checkpoint / "dcp", no_dist=True)
    specs = {name: InputSpec(shape=("batch", *shape), dtype=dtype) for name, (shape, dtype) in INPUTS.items()}
    ModuleFile(factory="mixed_own_module:Mixed", inputs=specs).write(checkpoint)
    convert(checkpoint, to=root / "model")
    sys.path.remove(str(root))
    sys.modules.pop("mixed_own_module")  # serving needs nothing of it
    settings = ReplicaSettings(
        name="mixed",
        model_path=str(root / "model"),
        digest="d",
        version="1",
        deployment_id="x",
        slots=1,
        context=None,
        prefill_chunk_tokens=8,
        decode_steps=1,
        max_batch_rows=4,
    )
    replica = Replica.of(settings)
    yield module.eval(), TestClient(replica.app), replica
    replica.stop()


@pytest.mark.parametrize("num", [1, 4, 7])
def test_predictions_are_torchs(served, num: int) -> None:
    module, client, _ = served
    arrays = draw(num, seed=num)
    with torch.no_grad():
        expected = module(**as_torch(arrays))
    body = {"inputs": {name: array.tolist() for name, array in arrays.items()}}
    outputs = client.post("/v1/predict", json=body).json()["outputs"]
    assert set(outputs) == {"logits", "hidden"}
    for name, values in outputs.items():
        np.testing.assert_allclose(values, expected[name].numpy(), atol=TOLERANCE)
    file = io.BytesIO()
    np.savez(file, **arrays)
    packed = client.post("/v1/predict", content=file.getvalue(), headers={"content-type": "application/x-npz"})
    with np.load(io.BytesIO(packed.content)) as found:
        np.testing.assert_allclose(found["logits"], expected["logits"].numpy(), atol=TOLERANCE)


def test_nothing_compiles_while_it_serves_and_its_facts_say_what_it_is(served) -> None:
    _, client, replica = served
    health = client.get("/health").json()
    assert (health["endpoint"], health["compiles_while_serving"], health["max_batch_rows"]) == ("predict", 0, 4)
    assert client.get("/v1/models/mixed").json()["inputs"]["flags"] == {"shape": ["rows", 3], "dtype": "bool"}
    replica.check_health()


def test_other_parameters_change_the_answers_and_the_old_ones_bring_them_back_bit_for_bit(served) -> None:
    _, client, replica = served
    body = {"inputs": {name: array.tolist() for name, array in draw(2, seed=5).items()}}

    def answer():
        found = client.post("/v1/predict", json=body).json()
        fingerprints.append(found["system_fingerprint"])
        return found["outputs"]["logits"]

    fingerprints: list[str] = []
    hosted, before = replica.only, answer()
    doubled = jax.tree.map(
        lambda leaf: leaf * 2 if leaf.dtype == "float32" else leaf,
        hosted.served.leaves_of(load_model(Path(hosted.settings.model_path), dtype="float32")),
    )
    old = hosted.served.swap(doubled, "2-d")
    assert not np.allclose(answer(), before)
    with pytest.raises(ParameterError, match="differ from those that are served"):
        hosted.served.swap(jax.tree.map(lambda leaf: leaf[..., None], doubled), "3-d")
    hosted.served.swap(old, "1-d")
    assert answer() == before
    assert fingerprints == ["1-d", "2-d", "1-d"]
    assert client.get("/health").json()["compiles_while_serving"] == 0


@pytest.mark.parametrize("kind", [ModelKind.SEQ2SEQ_LM, ModelKind.SPEECH_TO_TEXT, ModelKind.IMAGE_TEXT])
def test_kinds_that_are_not_served_are_refused_with_those_that_are(tmp_path, kind: ModelKind) -> None:
    loaded = LoadedModel(
        settings=None,
        directory=tmp_path,
        description=SimpleNamespace(kind=kind, name="some"),
        module=None,
        device=None,
        placement=None,
        meshes=(),
        load=None,
    )
    with pytest.raises(ParameterError, match=rf"a {kind.value} model \(some\) is not served") as caught:
        serve(loaded)
    assert "/v1/predict" in caught.value.hint
