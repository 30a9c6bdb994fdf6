"""A Flax model directory reads as the torch checkpoint it came from, or says what of it does not fit."""

import json

import numpy as np
import pytest

from converters.conversion import convert
from converters.flax_source import FlaxSource
from pipeline.errors import ArtifactError, ConversionError
from pipeline.models.checkpoint import read_parameters, save_parameters


@pytest.fixture
def converted(llama, checkpoint, tmp_path):
    model = llama()
    convert(checkpoint(model), to=tmp_path / "flax")
    return model, tmp_path / "flax"


def test_every_tensor_is_read_under_torchs_name(converted):
    model, directory = converted
    source = FlaxSource(directory)
    state = model.state_dict()
    assert source.headers.keys() == state.keys()
    for name, value in state.items():
        assert source.headers[name].shape == tuple(value.shape)
        assert np.array_equal(source.read(name), value.numpy()), name


def test_leaves_that_do_not_fit_the_record_are_named_together(converted):
    _, directory = converted
    leaves = read_parameters(directory / "params")
    (directory / "params").rename(directory / "before")
    del leaves["norm.scale"]
    leaves["layers.0.mlp.up_proj.kernel"] = leaves["layers.0.mlp.up_proj.kernel"].T.copy()
    leaves["extra.kernel"] = np.zeros((2, 2), "f4")
    save_parameters(directory / "params", leaves)
    with pytest.raises(ArtifactError) as caught:
        FlaxSource(directory)
    assert "norm.scale: float32 [48], stored is nothing" in str(caught.value)
    assert "layers.0.mlp.up_proj.kernel: float32 [48, 72], stored is float32 [72, 48]" in str(caught.value)
    assert "extra.kernel: is not in the record" in str(caught.value)


def test_a_record_of_other_rules_is_refused(converted):
    _, directory = converted
    record = json.loads((directory / "conversion.json").read_text())
    for conversion in record["tensors"]:
        for target in conversion["targets"]:
            target["path"] = target["path"].replace("norm.scale", "norm.weight")
    (directory / "conversion.json").write_text(json.dumps(record))
    with pytest.raises(ArtifactError, match=r"norm\.weight: no rule makes it"):
        FlaxSource(directory)


def test_a_familys_model_without_a_record_goes_back_by_its_config(converted):
    model, directory = converted
    (directory / "conversion.json").unlink()
    source = FlaxSource(directory)
    assert source.manifest.road_reason == "there is no conversion record; the leaves are those of the family"
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert source.headers.keys() == state.keys()
    for name, value in state.items():
        assert np.array_equal(source.read(name), value.numpy()), name


def test_without_a_record_the_leaves_must_be_those_of_the_family(converted):
    _, directory = converted
    (directory / "conversion.json").unlink()
    leaves = read_parameters(directory / "params")
    (directory / "params").rename(directory / "before")
    save_parameters(directory / "params", {**leaves, "extra.kernel": np.zeros((2, 2), "f4")})
    with pytest.raises(ConversionError, match=r"extra\.kernel: the model has no such leaf"):
        FlaxSource(directory)


def test_a_traced_model_without_a_record_is_an_error_that_names_it(converted):
    _, directory = converted
    (directory / "conversion.json").unlink()
    (directory / "program.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"conversion\.json"):
        FlaxSource(directory)
