"""Safetensors headers are believed only when they describe their files exactly."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from converters.readers import open_source
from converters.safetensors_reader import SafetensorsSource
from pipeline.errors import CheckpointError

MIXED = {
    "a": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16),
    "b": torch.tensor([1.0], dtype=torch.float16),
    "c": torch.tensor([0.1, 0.2, 0.3]),
    "d": torch.tensor(2.5),
}


def write_raw(path: Path, header: dict | str, body: bytes) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def entry(*, dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, int] = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_each_tensor_has_its_own_dtype_c14(tmp_path):
    """A float16 1.0 read with the file's first dtype, bfloat16, would be 0.0078125."""
    save_file(MIXED, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    assert source.format == "safetensors"
    assert float(source.read("b")[0]) == 1.0
    for name, tensor in MIXED.items():
        array = source.read(name)
        assert array.shape == tuple(tensor.shape)
        assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
        assert (array.astype(np.float32) == tensor.float().numpy()).all()


def test_fp8_keeps_its_name_and_is_not_read_as_a_weight_c14(tmp_path):
    save_file({"w": torch.tensor([448.0]).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    assert source.headers["w"].dtype == "float8_e4m3fn"
    with pytest.raises(CheckpointError, match="w has dtype float8_e4m3fn, which is not read as a weight"):
        source.read("w")


def sharded(directory: Path) -> Path:
    save_file({"a": MIXED["a"]}, directory / "model-00001-of-00002.safetensors")
    save_file({"c": MIXED["c"]}, directory / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def test_index_joins_files(tmp_path):
    source = open_source(sharded(tmp_path))
    assert list(source.headers) == ["a", "c"]
    assert source.read("c").tolist() == MIXED["c"].numpy().tolist()


def test_index_and_files_must_agree(tmp_path):
    sharded(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps({"weight_map": {"z": weight_map["a"], "a": weight_map["c"]}}))
    with pytest.raises(CheckpointError) as caught:
        open_source(tmp_path)
    assert "z: the index names it, no file holds it" in str(caught.value)
    assert "c: in model-00002-of-00002.safetensors, not in the index" in str(caught.value)


def test_missing_shard_is_named(tmp_path):
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: missing"):
        open_source(tmp_path)


def test_index_that_leads_outside_is_refused(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../x.safetensors"}}')
    with pytest.raises(CheckpointError, match="points outside"):
        open_source(tmp_path)


def test_several_files_without_an_index_are_not_guessed_together_c15(tmp_path):
    (sharded(tmp_path) / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files and no \*\.safetensors\.index\.json"):
        open_source(tmp_path)


def test_per_rank_files_are_not_taken_for_whole_tensors_c15(tmp_path):
    save_file({"w": torch.zeros(2, 4)}, tmp_path / "m.safetensors", metadata={"DCP_SHARDING_INFO": "{}"})
    with pytest.raises(CheckpointError, match="a per-rank file of sharded tensors"):
        open_source(tmp_path)


def test_truncated_file_is_named_with_sizes(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(MIXED, path)
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    with pytest.raises(CheckpointError, match=rf"truncated: {len(content) - 3} bytes, the header describes"):
        SafetensorsSource.open(tmp_path)


def test_file_cut_after_opening_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(MIXED, path)
    source = open_source(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="ends after"):
        for name in MIXED:
            source.read(name)


@pytest.mark.parametrize(
    ("header", "body", "complaint"),
    [
        ({"w": entry(dtype="F3")}, bytes(8), "malformed header entry"),
        ({"w": {"dtype": "F32"}}, bytes(8), "malformed header entry"),
        ({"w": entry(shape=(3,))}, bytes(8), "does not fill the bytes 0 to 8"),
        ({"w": entry(shape=(-2,), offsets=(0, -8))}, bytes(8), "does not fill"),
        ({"w": entry(), "v": entry(offsets=(4, 12))}, bytes(12), "starts at byte"),
        ({"w": entry()}, bytes(9), "longer than its header says"),
        ("[1]", b"", "no JSON object"),
        ("{", b"", "Expecting property name"),
        ('{"w": 1, "w": 2}', b"", "names a tensor twice"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, header, body, complaint):
    write_raw(tmp_path / "model.safetensors", header, body)
    with pytest.raises(CheckpointError, match=complaint):
        open_source(tmp_path)


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 10) + b"{}"])
def test_header_length_is_checked_before_it_is_believed(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_source(tmp_path)
