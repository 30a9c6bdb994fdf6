"""Float8 weights are multiplied with their scales, and neither is taken without the other."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from converters.readers import open_source
from pipeline.errors import CheckpointError

E4M3 = torch.float8_e4m3fn


def saved(directory: Path, tensors: dict[str, torch.Tensor], **quantization: object) -> Path:
    save_file(tensors, directory / "model.safetensors")
    if quantization:
        (directory / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    return directory


def test_scale_of_a_tensor_is_applied_c14(tmp_path):
    """Stored 448 with the scale 0.01: without it the weight would be a hundred times too large."""
    weight = torch.tensor([[448.0, -2.0]]).to(E4M3)
    source = open_source(saved(tmp_path, {"w.weight": weight, "w.weight_scale": torch.tensor(0.01)}))
    assert list(source.headers) == ["w.weight"]
    assert source.headers["w.weight"].dtype == "float32"
    assert source.read("w.weight")[0, 0] == pytest.approx(4.48, rel=1e-7)
    assert source.dequantized == {"w.weight": "float8_e4m3fn with w.weight_scale ()"}


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize("scale_shape", [(5,), (5, 1)])
def test_scale_of_each_row(tmp_path, dtype, scale_shape):
    weight = torch.randn(5, 3).to(dtype)
    scale = torch.rand(5) + 0.5
    tensors = {"w.weight": weight, "w.weight_scale": scale.reshape(scale_shape), "n.weight": torch.ones(2)}
    source = open_source(saved(tmp_path, tensors))
    assert (source.read("w.weight") == (weight.float() * scale[:, None]).numpy()).all()
    assert source.read("n.weight").tolist() == [1.0, 1.0]


def test_scale_of_each_block_with_ragged_edges(tmp_path):
    """5 x 7 in blocks of 2 x 3: the last blocks are cut on both axes."""
    weight = torch.randn(5, 7).to(E4M3)
    scale = torch.rand(3, 3, dtype=torch.float32) + 0.5
    tensors = {"w.weight": weight, "w.weight_scale_inv": scale}
    source = open_source(saved(tmp_path, tensors, quant_method="fp8", weight_block_size=[2, 3]))
    spread = scale.repeat_interleave(2, 0)[:5].repeat_interleave(3, 1)[:, :7]
    assert (source.read("w.weight") == (weight.float() * spread).numpy()).all()
    assert source.config() == {"model_type": "llama"}  # it is no quantized model any more


def test_blocks_are_128_wide_unless_the_config_says(tmp_path):
    weight = torch.randn(130, 256).to(E4M3)
    scale = torch.rand(2, 2) + 0.5
    source = open_source(saved(tmp_path, {"w": weight, "w_scale_inv": scale}))
    found = source.read("w")
    assert (found[:128, 128:] == (weight[:128, 128:].float() * scale[0, 1]).numpy()).all()
    assert (found[128:, :128] == (weight[128:, :128].float() * scale[1, 0]).numpy()).all()


def test_scale_of_each_block_of_a_tensor_that_is_one_block_wide(tmp_path):
    weight = torch.randn(130, 64).to(E4M3)
    scale = torch.rand(2, 1) + 0.5
    source = open_source(saved(tmp_path, {"w": weight, "w_scale_inv": scale}))
    assert (source.read("w") == (weight.float() * scale.repeat_interleave(128, 0)[:130]).numpy()).all()


def test_scales_of_activations_are_left_out(tmp_path):
    tensors = {
        "w.weight": torch.ones(2, 2).to(E4M3),
        "w.weight_scale": torch.tensor([0.5]),
        "w.input_scale": torch.tensor(3.0),
    }
    source = open_source(saved(tmp_path, tensors))
    assert list(source.headers) == ["w.weight"]
    assert source.read("w.weight").tolist() == np.full((2, 2), 0.5).tolist()


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"w.weight": torch.ones(2, 2).to(E4M3)}, r"w\.weight is float8_e4m3fn and needs one scale; .* has none of"),
        (
            {"w.weight": torch.ones(2).to(E4M3), "w.weight_scale": torch.ones(1), "v.weight_scale": torch.ones(1)},
            r"v\.weight_scale: a scale, but v\.weight is no float8 tensor",
        ),
        (
            {"w": torch.ones(2).to(E4M3), "w_scale": torch.ones(1), "w_scale_inv": torch.ones(1)},
            "several: w_scale_inv, w_scale",
        ),
        ({"w": torch.ones(2, 3).to(E4M3), "w_scale": torch.ones(3)}, r"w_scale: \(3,\) float32 is no scale for w"),
        ({"w": torch.ones(2, 3).to(E4M3), "w_scale": torch.ones(1, dtype=torch.int32)}, "int32 is no scale for w"),
    ],
)
def test_scales_and_tensors_that_do_not_pair_are_refused(tmp_path, tensors, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        open_source(saved(tmp_path, tensors))


def test_block_size_that_is_none_is_refused(tmp_path):
    tensors = {"w": torch.ones(2, 2).to(E4M3), "w_scale": torch.ones(1)}
    with pytest.raises(CheckpointError, match="weight_block_size is '128'; allowed: two sizes"):
        open_source(saved(tmp_path, tensors, weight_block_size="128"))


def test_quantization_that_is_no_object_is_refused(tmp_path):
    saved(tmp_path, {"w": torch.ones(2, 2).to(E4M3), "w_scale": torch.ones(1)})
    (tmp_path / "config.json").write_text('{"quantization_config": "fp8"}')
    with pytest.raises(CheckpointError, match="quantization_config must be an object, found 'fp8'"):
        open_source(tmp_path)
