"""Files that the reference implementation reads back, bit for bit."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from converters.operations import DTYPES
from converters.safetensors_reader import SafetensorsSource
from converters.safetensors_writer import write_file, write_sharded
from converters.source import TensorHeader


def headers_of(arrays):
    return {name: TensorHeader(name=name, shape=a.shape, dtype=str(a.dtype)) for name, a in arrays.items()}


def drawn(dtype, shape, seed=0):
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, DTYPES[dtype].itemsize), dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    return raw.reshape(-1).view(DTYPES[dtype]).reshape(shape)


@settings(deadline=None, max_examples=25)
@given(
    kinds=st.lists(st.sampled_from(sorted(set(DTYPES) - {"complex64"})), min_size=1, max_size=6),
    shape=st.lists(st.integers(0, 4), max_size=3),
    seed=st.integers(0, 1000),
)
def test_every_dtype_and_shape_comes_back(tmp_path_factory, kinds, shape, seed):
    arrays = {f"t{i}.{kind}": drawn(kind, tuple(shape), seed + i) for i, kind in enumerate(kinds)}
    path = tmp_path_factory.mktemp("written") / "model.safetensors"
    write_file(path, headers=headers_of(arrays), read=arrays.__getitem__)
    theirs, ours = load_file(path), SafetensorsSource.open(path)
    for name, array in arrays.items():
        for found in (theirs[name], ours.read(name)):
            assert (found.shape, found.dtype, found.tobytes()) == (array.shape, array.dtype, array.tobytes()), name


def test_the_metadata_is_what_transformers_asks_for_and_tensors_are_aligned(tmp_path):
    arrays = {"a": np.ones(3, np.int8), "b": np.ones(2, np.float32), "c": np.ones(1, ml_dtypes.bfloat16)}
    write_file(tmp_path / "m.safetensors", headers=headers_of(arrays), read=arrays.__getitem__)
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    raw = (tmp_path / "m.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert (8 + length) % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert header["b"]["data_offsets"] == [0, 8]
    assert header["c"]["data_offsets"] == [8, 10]
    assert header["a"]["data_offsets"] == [10, 13]


def test_shards_hold_what_fits_and_a_large_tensor_has_one_of_its_own(tmp_path):
    arrays = {f"t{i}": np.full(size, i, np.float32) for i, size in enumerate((10, 10, 10, 100, 5))}
    told = []
    files = write_sharded(
        tmp_path,
        headers=headers_of(arrays),
        read=arrays.__getitem__,
        max_shard_bytes=80,
        progress=lambda done, total: told.append((done, total)),
    )
    assert files[:-1] == tuple(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 135, "total_size": 540}
    assert [index["weight_map"][f"t{i}"][6:11] for i in range(5)] == ["00001", "00001", "00002", "00003", "00004"]
    source = SafetensorsSource.open(tmp_path)
    assert all((source.read(name) == array).all() for name, array in arrays.items())
    assert told == [(n, 5) for n in range(1, 6)]


def test_a_tensor_that_is_not_as_announced_is_refused(tmp_path):
    headers = headers_of({"a": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"a: announced as \(3,\) float32, found \(4,\) float32"):
        write_file(tmp_path / "m.safetensors", headers=headers, read=lambda _: np.ones(4, np.float32))
