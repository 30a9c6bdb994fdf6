"""An ONNX graph gives back the parameters of the torch model it was exported from, or says which it cannot name."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.numpy_helper import from_array
from transformers import LlamaConfig, LlamaForCausalLM

from converters.readers import open_source
from pipeline.errors import CheckpointError

KERNEL = np.arange(6, dtype=np.float32).reshape(3, 2)


def write(
    directory: Path, initializers: list[onnx.TensorProto], nodes: list[onnx.NodeProto], *, name: str = "model.onnx"
) -> Path:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], initializer=initializers)
    onnx.save_model(helper.make_model(graph), directory / name)
    return directory / name


def product(weight: str, *, name: str = "", scopes: str | None = None, kind: str = "MatMul") -> onnx.NodeProto:
    node = helper.make_node(kind, ["x", weight], ["y"], name=name)
    if scopes is not None:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    return node


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, LlamaForCausalLM]:
    torch.manual_seed(5)
    sizes = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2, head_dim=6, use_cache=False)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the exporter keeps equal tensors once
            parameter.add_(torch.rand_like(parameter) / 10)
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    tokens = {"input_ids": torch.ones(2, 5, dtype=torch.int64)}
    torch.onnx.export(model, (), path, kwargs=tokens, dynamo=True, verbose=False)
    (path.parent / "config.json").write_text(json.dumps(config.to_dict()))
    return path, model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_exported_model_is_read_by_the_names_of_its_modules(exported):
    path, model = exported
    source = open_source(path)
    assert source.format == "onnx"
    wanted = {name: value.numpy() for name, value in model.state_dict().items()}
    assert set(source.headers) == set(wanted)
    assert all((source.read(name) == value).all() for name, value in wanted.items())
    assert all(source.headers[name].shape == value.shape for name, value in wanted.items())
    assert source.config()["model_type"] == "llama"


def test_names_of_the_older_exporter_are_paths(tmp_path):
    path = write(
        tmp_path,
        [from_array(KERNEL, "onnx::MatMul_13"), from_array(KERNEL[0], "layers.0.bias")],
        [product("onnx::MatMul_13", name="/layers.0/up/MatMul")],
    )
    source = open_source(path)
    assert (source.read("layers.0.up.weight") == KERNEL.T).all()
    assert source.read("layers.0.bias").shape == (2,)


def test_kernel_that_the_graph_transposes_itself_is_left_alone(tmp_path):
    node = product("w", name="/up/Gemm", kind="Gemm")
    node.attribute.append(helper.make_attribute("transB", 1))
    assert (open_source(write(tmp_path, [from_array(KERNEL, "w")], [node])).read("up.weight") == KERNEL).all()


def test_weights_without_a_name_are_all_listed(tmp_path):
    path = write(
        tmp_path,
        [from_array(KERNEL, "val_1"), from_array(KERNEL, "val_2"), from_array(KERNEL, "mask")],
        [product("val_1", name="node_1"), product("val_2", scopes="oops")],
    )
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    assert "val_1 (3, 2): no module's name stands beside it" in str(caught.value)
    assert "val_2 (3, 2): no module's name stands beside it" in str(caught.value)
    assert "mask" not in str(caught.value)  # a constant of the graph, as no product of a module uses it
    assert "torch.onnx.export, which keeps the names of modules" in str(caught.value)


def test_every_dtype_empty_and_scalar(tmp_path):
    arrays = {
        f"m.{dtype}": np.array([1, 0, 1]).astype(dtype)
        for dtype in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint8", "bool")
    } | {"m.scalar": np.float32(2.5), "m.empty": np.zeros((0, 3), np.float32)}
    tensors = [from_array(np.asarray(array), name) for name, array in arrays.items()]
    tensors.append(helper.make_tensor("m.bf16", TensorProto.BFLOAT16, [2], [1.5, -2.0]))
    tensors.append(helper.make_tensor("m.typed", TensorProto.FLOAT, [2, 1], [1.5, -2.0]))
    source = open_source(write(tmp_path, tensors, [product("m.float32", name="n")]))
    for name, array in arrays.items():
        assert (source.read(name) == array).all()
        assert str(source.read(name).dtype) == source.headers[name].dtype == str(array.dtype)
    assert source.read("m.bf16").astype(np.float32).tolist() == [1.5, -2.0]
    assert source.read("m.typed").tolist() == [[1.5], [-2.0]]


def external(directory: Path, *, location: str = "data", length: int = 24, offset: int = 8) -> Path:
    (directory / "data").write_bytes(bytes(8) + KERNEL.tobytes())
    tensor = TensorProto(name="m.w", data_type=TensorProto.FLOAT, dims=[3, 2], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))
    return write(directory, [tensor], [product("m.w", name="n")])


def test_numbers_beside_the_graph_are_read_from_their_place(tmp_path):
    source = open_source(external(tmp_path))
    assert (source.read("m.w") == KERNEL).all()
    (tmp_path / "data").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"data: m\.w ends after 0 of 24 bytes"):
        source.read("m.w")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"location": "../data"}, "is no file beside the graph"),
        ({"location": "/etc/passwd"}, "is no file beside the graph"),
        ({"location": "absent"}, "is no file beside the graph"),
        ({"length": 20}, r"shape \(3, 2\) float32 does not fill 20 bytes"),
        ({"offset": 100}, "does not fill 24 bytes at 100"),
        ({"offset": -8}, "does not fill 24 bytes at -8"),
        ({"offset": "x"}, "invalid literal"),
    ],
)
def test_places_that_lead_nowhere_are_refused(tmp_path, given, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        open_source(external(tmp_path, **given))


def test_links_of_a_cache_are_followed_and_others_are_not(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    external(tmp_path / "blobs")
    for name in ("model.onnx", "data"):
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name)
    assert (open_source(tmp_path / "snapshot").read("m.w") == KERNEL).all()
    (tmp_path / "snapshot" / "data").unlink()
    (tmp_path / "snapshot" / "data").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match=r"m\.w: its numbers lie in data, a link to /etc/passwd, away from"):
        open_source(tmp_path / "snapshot")


def test_quantized_graph_is_refused(tmp_path):
    path = write(tmp_path, [from_array(KERNEL, "m.w")], [product("m.w", kind="MatMulInteger")])
    with pytest.raises(CheckpointError, match="computes with MatMulInteger, so its weights are not the model's own"):
        open_source(path)


def test_graph_of_no_family_says_what_to_do(tmp_path):
    source = open_source(write(tmp_path, [from_array(KERNEL, "m.w")], [product("m.w", name="n")]))
    with pytest.raises(CheckpointError, match=r"does not say which family it is of.*\n.*put the config\.json"):
        source.config()


@pytest.mark.parametrize("content", [b"", b"abc", b"\x08\x07", bytes(100), b"\x3a\xff\xff\xff\xff\x07"])
def test_what_is_no_graph_is_refused(tmp_path, content):
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.onnx: not read as an ONNX model"):
        open_source(tmp_path)
