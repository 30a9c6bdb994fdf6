"""Whatever lies in a checkpoint's place: it is read in full, or refused by an error that names it.

Never a crash, never code run, nothing written, no memory taken for what a header merely claims. Every format is damaged
at random (cut, flipped, spliced, with numbers overwritten by extreme ones) and by declared cases.
"""

import builtins
import errno
import io
import json
import os
import pickle
import resource
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.distributed.checkpoint as dcp
from gguf import GGMLQuantizationType, GGUFWriter, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.numpy_helper import from_array
from safetensors.torch import save_file

from converters.readers import open_source
from pipeline.errors import PipelineError

MAX_GROWTH_KB = 400_000
"""Of the process over all of this file. The largest valid file here has 20 kB; headers claim up to 2**63 bytes."""
EXTREMES = (0, 1, 2**31 - 1, 2**32 - 1, 2**48, 2**63 - 1, 2**64 - 1)
EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

OPEN = io.open

TENSORS = {
    "model.a.weight": torch.arange(12.0).reshape(3, 4),
    "model.b.weight": torch.ones(2, 2, dtype=torch.bfloat16),
    "model.c": torch.tensor(5),
}


def safetensors(directory: Path) -> None:
    save_file(TENSORS, directory / "model.safetensors")


def sharded(directory: Path) -> None:
    names = list(TENSORS)
    for number, part in enumerate((names[:1], names[1:]), start=1):
        save_file({name: TENSORS[name] for name in part}, directory / f"model-{number}.safetensors")
    weight_map = {name: f"model-{1 if name == names[0] else 2}.safetensors" for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def ranks(directory: Path) -> None:
    for rank in range(2):
        place = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2 * rank, 0]}})}
        save_file({"w": torch.full((2, 3), float(rank))}, directory / f"rank-{rank}.safetensors", metadata=place)


def float8(directory: Path) -> None:
    tensors = {"w.weight": torch.ones(3, 4).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(1, 1)}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text('{"quantization_config": {"weight_block_size": [128, 128]}}')


def torch_file(directory: Path) -> None:
    torch.save({"model": TENSORS, "step": 3}, directory / "model.pt")


def legacy_torch_file(directory: Path) -> None:
    torch.save(TENSORS, directory / "model.pt", _use_new_zipfile_serialization=False)


def torch_dcp(directory: Path) -> None:
    dcp.save({"model": TENSORS, "optimizer": {"m": torch.ones(2)}}, checkpoint_id=directory / "dcp", no_dist=True)


def gguf(directory: Path) -> None:
    writer = GGUFWriter(directory / "model.gguf", "llama")
    for key, value in {
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 64,
        "context_length": 8,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.0])
    for name, rows in {"token_embd": 7, "blk.0.attn_q": 32, "blk.0.ffn_up": 64}.items():
        data = quants.quantize(np.ones((rows, 32), np.float32), GGMLQuantizationType.Q4_0)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=GGMLQuantizationType.Q4_0)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def onnx_graph(directory: Path) -> None:
    kernel = np.arange(6, dtype=np.float32).reshape(3, 2)
    external = TensorProto(name="m.w", data_type=TensorProto.FLOAT, dims=[3, 2], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "numbers", "offset": "0", "length": "24"}.items():
        external.external_data.add(key=key, value=value)
    (directory / "numbers").write_bytes(kernel.tobytes())
    nodes = [helper.make_node("MatMul", ["x", "onnx::MatMul_1"], ["y"], name="/up/MatMul")]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    initializers = [from_array(kernel, "onnx::MatMul_1"), external]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], initializer=initializers)
    onnx.save_model(helper.make_model(graph), directory / "model.onnx")


FORMATS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        *(safetensors, sharded, ranks, float8, torch_file, legacy_torch_file),
        *(torch_dcp, gguf, onnx_graph),
    )
}


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> dict[str, Path]:
    """A directory of each format that is read in full."""
    found = {}
    for name, write in FORMATS.items():
        found[name] = tmp_path_factory.mktemp(name)
        write(found[name])
        assert read_everything(found[name]) == []
    return found


@pytest.fixture(scope="module", autouse=True)
def memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KB


def read_everything(path: Path) -> list[str]:
    """Open the checkpoint and read all of it; the refusal, where there is one. Any other exception is a crash."""
    before = listing(path.parent)
    try:
        source = open_source(path)
        for name, header in source.headers.items():
            array = source.read(name)
            assert (array.shape, str(array.dtype)) == (header.shape, header.dtype)
        if source.format == "gguf" or (path / "config.json").exists():
            source.config()
        source.companions()
    except PipelineError as error:
        assert str(path) in str(error)
        return [str(error)]
    finally:
        assert listing(path.parent) == before
    return []


def listing(directory: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in directory.rglob("*"))


def damage(content: bytes, data: st.DataObject) -> bytes:
    """One kind of damage at one place; places near the ends and in headers are as likely as all others together."""
    size = len(content)
    places = st.one_of(
        st.integers(0, size - 1), st.integers(0, min(size - 1, 64)), st.integers(max(size - 64, 0), size - 1)
    )
    place = data.draw(places)
    kind = data.draw(st.sampled_from(["cut", "flip", "number", "splice", "repeat", "zeros"]))
    if kind == "cut":
        return content[:place]
    if kind == "flip":
        return content[:place] + bytes([content[place] ^ (1 << data.draw(st.integers(0, 7)))]) + content[place + 1 :]
    if kind == "number":
        form = data.draw(st.sampled_from(["<Q", "<I", ">Q", ">I"]))
        width = struct.calcsize(form)
        number = struct.pack(form, data.draw(st.sampled_from(EXTREMES)) % 256**width)
        return content[:place] + number + content[place + width :]
    if kind == "splice":
        other = data.draw(places)
        return content[:place] + content[other : other + data.draw(st.integers(1, 64))] + content[place:]
    if kind == "repeat":
        return content[:place] + content
    length = data.draw(st.integers(1, 64))
    return content[:place] + bytes(length) + content[place + length :]


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(data=st.data())
def test_random_damage_is_refused_or_does_no_harm(name, valid, tmp_path, data):
    directory = tmp_path / "damaged"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(valid[name], directory)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        content = damage(content, data) or b"\0"
    path.write_bytes(content)
    read_everything(directory)


@pytest.mark.parametrize("name", FORMATS)
def test_every_truncation_of_a_header_is_refused(name, valid, tmp_path):
    """Cut at each of the first 200 bytes of each file, and at each of the last 30."""
    directory = tmp_path / "cut"
    shutil.copytree(valid[name], directory)
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for length in {*range(min(200, len(content))), *range(max(len(content) - 30, 0), len(content))}:
            path.write_bytes(content[:length])
            # A DCP shard may lose its end, where the optimizer lies, and a torch archive of old its list of storages.
            assert read_everything(directory) or path.suffix in (".distcp", ".json")
        path.write_bytes(content)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    os.chdir(path.parent)  # such a name has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


IN_PLACE: dict[str, Callable[[Path], object]] = {
    "empty file": lambda path: path.write_bytes(b""),
    "directory": lambda path: path.mkdir(),
    "pipe": pipe,
    "socket": unix_socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to("absent"),
    "link to a text outside": lambda path: path.symlink_to("/etc/passwd"),
    "text": lambda path: path.write_text("hello"),
    "json": lambda path: path.write_text("{}"),
    "deep json": lambda path: path.write_text("[" * 200_000),
    "numbers without end": lambda path: path.write_text('{"weight_map": NaN, "a": 1e999}'),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("name", FORMATS)
def test_something_else_in_a_file_s_place_is_refused(name, kind, valid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # and back afterwards
    files = sorted(path.relative_to(valid[name]) for path in valid[name].rglob("*") if path.is_file())
    for number, relative in enumerate(files):
        directory = tmp_path / f"c{number}"
        shutil.copytree(valid[name], directory)
        (directory / relative).unlink()
        IN_PLACE[kind](directory / relative)
        refusals = read_everything(directory)
        # A config may say nothing; numbers beside an ONNX graph have no form that a long enough file could lack.
        assert refusals or relative.name == "config.json" or (relative.name == "numbers" and "link" not in kind)


@pytest.mark.parametrize("name", FORMATS)
def test_file_without_permission_is_refused(name, valid, tmp_path, monkeypatch):
    """The refusal to open it is made here, for root may read everything."""
    shutil.copytree(valid[name], tmp_path / "c")
    for path in [path for path in (tmp_path / "c").rglob("*") if path.is_file()]:

        def refuse(file: object, *arguments: object, closed: Path = path, **options: object) -> object:
            if str(file) == str(closed):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
            return OPEN(file, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(io, "open", refuse)
            patch.setattr(builtins, "open", refuse)
            refusals = read_everything(tmp_path / "c")
        assert "Permission denied" in refusals[0]


@pytest.mark.parametrize("first", FORMATS)
def test_files_of_another_format_under_its_names_are_refused(first, valid, tmp_path):
    for second in FORMATS:
        ours, others = ([p for p in sorted(valid[n].rglob("*")) if p.is_file()] for n in (first, second))
        if first == second or ours[-1].suffix == others[-1].suffix:
            continue
        directory = tmp_path / second
        shutil.copytree(valid[first], directory)
        for path in ours:
            shutil.copyfile(others[-1], directory / path.relative_to(valid[first]))
        assert read_everything(directory)


def header(entries: object, *, body: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(*, dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


LIES = {
    "header of 2**63 bytes": header({}, length=2**63),
    "header as long as the file": header({}, length=10),
    "no header": bytes(8),
    "the same name twice": header(b'{"w": 1, "w": 1}'),
    "overlapping tensors": header({"v": entry(), "w": entry(offsets=(4, 12))}, body=bytes(12)),
    "bytes of nobody": header({"v": entry(offsets=(4, 12))}, body=bytes(12)),
    "end beyond the file": header({"v": entry(shape=(2**40,), offsets=(0, 2**42))}, body=bytes(8)),
    "sizes that overflow to zero": header({"v": entry(shape=(2**32, 2**32), offsets=(0, 0))}),
    "sizes that overflow 64 bits": header({"v": entry(shape=(2**62, 4), offsets=(0, 16))}, body=bytes(16)),
    "negative size": header({"v": entry(shape=(-1, -2))}, body=bytes(8)),
    "offsets backwards": header({"v": entry(shape=(0,), offsets=(8, 0))}, body=bytes(8)),
    "size that is no number": header(b'{"v": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', body=bytes(8)),
    "infinite offset": header(b'{"v": {"dtype": "F32", "shape": [2], "data_offsets": [0, Infinity]}}', body=bytes(8)),
    "number of 5000 digits": header(
        b'{"v": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}'
    ),
    "text for a size": header({"v": entry(shape=("2",))}, body=bytes(8)),
    "list for a dtype": header({"v": entry(dtype=["F32"])}, body=bytes(8)),
    "list for a tensor": header({"v": [1, 2]}, body=bytes(8)),
    "deep nesting": header(b'{"v": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "half a character": header(b'{"\xff": 1}'),
    "lone surrogate": header(b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'),
    "ranks without places": header({"v": entry(), "__metadata__": {"DCP_SHARDING_INFO": "{}"}}, body=bytes(8)),
    "rank at 2**60": header(
        {"v": entry(), "__metadata__": {"DCP_SHARDING_INFO": '{"v": {"saved_offsets": [1152921504606846976]}}'}},
        body=bytes(8),
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_safetensors_headers_that_lie_are_refused(lie, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(LIES[lie])
    assert read_everything(tmp_path)


class Trap:
    def __init__(self, function: Callable, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.call


TRAPS = {
    "os.system": Trap(os.system, "touch trapped"),
    "subprocess": Trap(subprocess.check_call, ["touch", "trapped"]),
    "eval": Trap(eval, "open('trapped', 'w')"),
    "exec": Trap(exec, "open('trapped', 'w')"),
    "getattr chain": Trap(getattr, Trap(getattr, Trap(__import__, "os"), "path"), "join"),
    "open for writing": Trap(open, "trapped", "w"),
    "writing a path": Trap(Path.write_text, Path("trapped"), "x"),
    "torch.load": Trap(torch.load, "other.pt"),
    "memory": Trap(bytearray, 2**40),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("trap", TRAPS)
def test_pickles_that_execute_are_refused_in_every_place(trap, protocol, valid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, relative in {"torch_dcp": "dcp/.metadata", "torch_file": "model.pt"}.items():
        for content in (TRAPS[trap], {"w": TRAPS[trap]}, [torch.Size([2]), TRAPS[trap]]):
            directory = tmp_path / "place" / name
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(valid[name], directory)
            (directory / relative).write_bytes(pickle.dumps(content, protocol=protocol))
            assert read_everything(directory)
            if protocol == 2 and name == "torch_file":
                for legacy in (True, False):
                    torch.save(content, directory / relative, _use_new_zipfile_serialization=not legacy)
                    assert read_everything(directory)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("name", ["torch_dcp/dcp/.metadata", "torch_file/model.pt"])
@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",
        b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
        b"\x80\x02r" + struct.pack("<I", 2**31 - 1) + b".",
        b"\x80\x02" + b"(" * 100_000,
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"I" + b"9" * 5000 + b"\n.",
    ],
    ids=["bytes without end", "number without end", "memo without end", "open marks", "deep lists", "many digits"],
)
def test_pickles_that_take_memory_are_refused(name, content, valid, tmp_path):
    format_name, _, relative = name.partition("/")
    shutil.copytree(valid[format_name], tmp_path / "c")
    (tmp_path / "c" / relative).write_bytes(content)
    assert read_everything(tmp_path / "c")


def test_onnx_name_that_is_no_text_is_refused(valid, tmp_path):
    shutil.copytree(valid["onnx_graph"], tmp_path / "c")
    path = tmp_path / "c" / "model.onnx"
    for text in (b"onnx::MatMul_1", b"/up/MatMul", b"location", b"m.w"):
        content = path.read_bytes()
        path.write_bytes(content.replace(text, b"\xff" + text[1:]))
        assert read_everything(tmp_path / "c")
        path.write_bytes(content)


def gguf_bytes(*, tensors: int = 0, keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


KEY = struct.pack("<Q", 1) + b"k"
GGUF_LIES = {
    "2**60 tensors": gguf_bytes(tensors=2**60),
    "2**60 keys": gguf_bytes(keys=2**60),
    "as many keys as bytes": gguf_bytes(keys=2, rest=bytes(26)),
    "key of 2**63 bytes": gguf_bytes(keys=1, rest=struct.pack("<Q", 2**63) + bytes(20)),
    "array of 2**62 bytes": gguf_bytes(keys=1, rest=KEY + struct.pack("<IIQ", 9, 0, 2**62)),
    "array of 2**62 texts": gguf_bytes(keys=1, rest=KEY + struct.pack("<IIQ", 9, 8, 2**62)),
    "arrays in arrays": gguf_bytes(keys=1, rest=KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10_000),
    "value of no type": gguf_bytes(keys=1, rest=KEY + struct.pack("<I", 77) + bytes(8)),
    "tensor of 2**31 axes": gguf_bytes(tensors=1, rest=KEY + struct.pack("<I", 2**31) + bytes(32)),
    "tensor of 2**62 numbers": gguf_bytes(tensors=1, rest=KEY + struct.pack("<IQQIQ", 2, 2**31, 2**31, 0, 0)),
    "tensor of no kind": gguf_bytes(tensors=1, rest=KEY + struct.pack("<IQIQ", 1, 1, 999, 0) + bytes(64)),
    "version 9": gguf_bytes(version=9),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("lie", GGUF_LIES)
def test_gguf_headers_that_lie_are_refused(lie, tmp_path):
    (tmp_path / "model.gguf").write_bytes(GGUF_LIES[lie])
    assert read_everything(tmp_path)


def test_experts_without_end_are_refused(tmp_path):
    """An empty tensor may have any number of rows; one name for each of them would take the memory."""
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint32("llama.expert_count", 4)
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((2**20, 0, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (refusal,) = read_everything(tmp_path)
    assert "not up to 1024 experts" in refusal
