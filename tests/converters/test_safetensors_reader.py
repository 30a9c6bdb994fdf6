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
    with pytest.raises(CheckpointError, match=r"2 safetensors files, and neither a \*\.safetensors\.index\.json nor"):
        open_source(tmp_path)


def save_parts(directory: Path, parts: dict[str, tuple[dict[str, torch.Tensor], dict[str, list[int]]]]) -> Path:
    for name, (tensors, starts) in parts.items():
        info = json.dumps({tensor: {"saved_offsets": start} for tensor, start in starts.items()})
        save_file(tensors, directory / name, metadata={"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"})
    return directory


WHOLE = torch.arange(16.0).reshape(4, 4)
UPPER = ({"w": WHOLE[:2].contiguous()}, {"w": [0, 0]})
LOWER = ({"w": WHOLE[2:].contiguous(), "b": torch.tensor(3.0)}, {"w": [2, 0], "b": []})


def test_parts_of_two_ranks_are_one_tensor_c15(tmp_path):
    """Two files, the same key, offsets in the metadata: the last file alone would be half a weight."""
    source = open_source(save_parts(tmp_path, {"shard-1.safetensors": LOWER, "shard-2.safetensors": UPPER}))
    assert source.headers["w"].shape == (4, 4)
    assert (source.read("w") == WHOLE.numpy()).all()
    assert source.read("b").shape == ()


def test_parts_on_a_grid_are_one_tensor(tmp_path):
    corners = {
        f"{row}{column}.safetensors": (
            {"w": WHOLE[row : row + 2, column : column + 2].contiguous()},
            {"w": [row, column]},
        )
        for row in (0, 2)
        for column in (0, 2)
    }
    assert (open_source(save_parts(tmp_path, corners)).read("w") == WHOLE.numpy()).all()


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"2": LOWER}, r"w: its parts hold 8 of 16 numbers; a rank's part is missing or doubled"),
        ({"1": UPPER, "2": UPPER}, r"w: its parts hold 16 of 8 numbers"),
        ({"1": UPPER, "2": ({"w": WHOLE[:2].contiguous()}, {})}, "DCP_SHARDING_INFO gives no place with 2 axes"),
        ({"1": UPPER, "2": ({"w": WHOLE[2:].half()}, {"w": [2, 0]})}, "with float16 and float32 of different forms"),
        (
            {
                "1": ({"w": torch.zeros(2, 2)}, {"w": [0, 0]}),
                "2": ({"w": torch.zeros(2, 2)}, {"w": [1, 1]}),
                "3": ({"w": torch.zeros(1)[None]}, {"w": [2, 0]}),
            },
            r"w: the part \(2, 2\) at \(1, 1\) overlaps another",
        ),
    ],
)
def test_parts_that_do_not_make_up_their_tensor_are_refused(tmp_path, parts, complaint):
    save_parts(tmp_path, {f"{name}.safetensors": part for name, part in parts.items()})
    with pytest.raises(CheckpointError, match=complaint):
        open_source(tmp_path)


def test_one_file_is_a_source_whatever_lies_beside_it(tmp_path):
    sharded(tmp_path)
    source = open_source(tmp_path / "model-00002-of-00002.safetensors")
    assert list(source.headers) == ["c"]
    assert source.directory == tmp_path


def test_every_dtype_is_read_as_it_is(tmp_path):
    tensors = {
        str(dtype).removeprefix("torch."): torch.tensor([0, 1, 1], dtype=dtype)
        for dtype in (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
            *(torch.int64, torch.int32, torch.int16, torch.int8),
            *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
        )
    } | {"empty": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    for name in tensors.keys() - {"empty"}:
        assert str(source.read(name).dtype) == source.headers[name].dtype == name
        assert source.read(name).astype(np.complex64).tolist() == [0, 1, 1]
    assert source.read("empty").shape == (0, 3)


def test_dtype_without_numbers_is_refused_by_name(tmp_path):
    write_raw(tmp_path / "model.safetensors", {"w": entry(dtype="F4", shape=(16,))}, bytes(8))
    source = open_source(tmp_path)
    assert source.headers["w"].dtype == "float4_e2m1fn"
    with pytest.raises(CheckpointError, match="w has dtype float4_e2m1fn, which is not read; allowed: float32"):
        source.read("w")


def test_mapped_reading_gives_the_same_numbers(tmp_path):
    save_file(MIXED | {"empty": torch.zeros(0)}, tmp_path / "model.safetensors")
    mapped = SafetensorsSource.open(tmp_path, reading="mapped")
    for name, header in SafetensorsSource.open(tmp_path).headers.items():
        assert mapped.read(name).shape == header.shape
        assert mapped.read(name).tobytes() == SafetensorsSource.open(tmp_path).read(name).tobytes()


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
        ({"w": entry(shape=(-2,), offsets=(0, -8))}, bytes(8), "must be a whole number, found '-2'"),
        ({"w": entry(shape=(2.0,))}, bytes(8), "must be a whole number, found '2.0'"),
        ({"w": entry(shape=(True, 2))}, bytes(8), "must be a whole number, found 'True'"),
        ({"w": entry(shape=(2**40, 2**40))}, bytes(8), "does not fill"),
        ({"w\x1b": entry()}, bytes(8), "is no name of a tensor"),
        ({"w": entry(), "__metadata__": {"DCP_SHARDING_INFO": "[]"}}, bytes(8), "DCP_SHARDING_INFO is malformed"),
        ({"w": entry(), "__metadata__": {"format": 1}}, bytes(8), "__metadata__ is no JSON object of texts"),
        ('{"w": ' + "[" * 100_000, b"", "nested too deep"),
        ({"w": entry(), "v": entry(offsets=(4, 12))}, bytes(12), "starts at byte"),
        ({"w": entry()}, bytes(9), "longer than its header says"),
        ("[1]", b"", "no JSON object"),
        ("{", b"", "Expecting property name"),
        ('{"w": 1, "w": 2}', b"", "names 'w' twice"),
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
