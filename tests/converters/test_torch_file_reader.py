"""Files of `torch.save` give tensors alone: whatever view they are, without code, without reading the whole file."""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from converters.readers import open_source
from converters.torch_file_reader import TorchFileSource
from pipeline.errors import CheckpointError

SHARED = torch.arange(12.0).reshape(3, 4)
STATE = {
    "transposed": SHARED.t(),
    "row_of_the_same_storage": SHARED[1],
    "every_second": torch.arange(20.0).reshape(4, 5)[1::2, ::2],
    "expanded": torch.tensor([2.5]).expand(4, 5),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "scalar": torch.tensor(3.0),
    "scalar_in_the_middle": torch.arange(5)[3],
    "empty": torch.zeros(0, 2),
    "half": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "double": torch.tensor([0.1], dtype=torch.float64),
    "counter": torch.tensor(7),
    "mask": torch.tensor([True, False]),
}
NEW_DTYPES = {"uint16": torch.tensor([1, 2], dtype=torch.uint16), "complex": torch.ones(2, dtype=torch.complex64)}
NESTINGS: dict[str, Callable[[dict], dict]] = {
    "bare": lambda state: state,
    "model": lambda state: {"model": state, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "epoch": 3},
    "state_dict": lambda state: {"state_dict": state, "hyper_parameters": {"lr": 0.1}},
    "app": lambda state: {"app": {"model_state_dict": state, "step": 3}},
}


def save(directory: Path, state: object, *, name: str = "model.pt", legacy: bool = False) -> Path:
    torch.save(state, directory / name, _use_new_zipfile_serialization=not legacy)
    return directory / name


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_every_view_comes_out_as_what_it_shows(tmp_path, nesting, legacy):
    state = STATE if legacy else STATE | NEW_DTYPES
    source = open_source(save(tmp_path, NESTINGS[nesting](state), legacy=legacy))
    assert source.format == "torch-file"
    assert set(source.headers) == set(state)
    for name, tensor in state.items():
        array = source.read(name)
        assert array.flags.c_contiguous
        assert array.shape == source.headers[name].shape == tuple(tensor.shape)
        assert str(array.dtype) == source.headers[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert (array.astype(np.complex128) == tensor.detach().to(torch.complex128).numpy()).all()


def test_headers_are_read_without_the_weights(tmp_path):
    """The storage's bytes are gone from the file's middle, and only reading them notices."""
    path = save(tmp_path, {"w": torch.full((64,), 7.0)})
    content = path.read_bytes()
    path.write_bytes(content.replace(np.full(64, 7.0, np.float32).tobytes(), bytes(256)))
    source = open_source(path)
    assert source.headers["w"].shape == (64,)
    with pytest.raises(CheckpointError, match=r"model\.pt: (the checksum of model/data/0 does not|w ends after)"):
        source.read("w")


def test_damage_in_the_rest_of_a_storage_is_noticed(tmp_path):
    whole = torch.full((64,), 7.0)
    path = save(tmp_path, {"w": whole[:2]})
    content = path.read_bytes()
    path.write_bytes(content.replace(whole.numpy().tobytes(), whole[:40].numpy().tobytes() + bytes(96)))
    with pytest.raises(CheckpointError, match=r"model\.pt: the checksum of model/data/0 does not hold"):
        open_source(path).read("w")


def test_file_saved_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path, {"w": torch.arange(3.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert open_source(path).read("w").tolist() == [0, 1, 2]


def test_index_joins_files(tmp_path):
    first, second = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    save(tmp_path, {"a": torch.ones(2)}, name=first)
    save(tmp_path, {"b": torch.zeros(3)}, name=second)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(f'{{"weight_map": {{"a": "{first}", "b": "{second}"}}}}')
    source = open_source(tmp_path)
    assert list(source.headers) == ["a", "b"]
    assert source.read("b").tolist() == [0, 0, 0]
    index.write_text(f'{{"weight_map": {{"a": "{first}", "c": "missing.bin"}}}}')
    with pytest.raises(CheckpointError, match=r"missing\.bin: missing"):
        open_source(tmp_path)


def test_model_is_found_beside_what_a_trainer_writes(tmp_path):
    save(tmp_path, {"a": torch.ones(2)}, name="pytorch_model.bin")
    for name in ("optimizer.pt", "training_args.bin", "rng_state_0.pth", "scheduler.pt"):
        (tmp_path / name).write_bytes(b"never read")
    assert list(open_source(tmp_path).headers) == ["a"]
    save(tmp_path, {"a": torch.ones(2)}, name="other.pt")
    with pytest.raises(CheckpointError, match=r"several files could be the model: other\.pt, pytorch_model\.bin"):
        open_source(tmp_path)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning", "ignore:.*quantize")
@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"model": {"w": SHARED}, "state_dict": {"w": SHARED}}, "several parts .*: 'model', 'state_dict'"),
        ({"generator": {"w": SHARED}, "critic": {"w": SHARED}}, "it holds: critic, generator"),
        ({"model": {}, "step": 1}, "holds no tensors"),
        ([SHARED], "holds a list, not a state dict"),
        ({"w": torch.eye(3).to_sparse()}, r"w: is a Tensor in torch\.sparse_coo layout; only dense"),
        ({"w": torch.ones(2, dtype=torch.complex64).conj()}, "w: is a quantized, conjugated or negated view"),
        ({"w": torch.ones(1).expand(2**20, 2**20)}, "w: .* takes 4398046511104 bytes, far more than its file holds"),
    ],
)
def test_what_is_no_state_dict_of_dense_tensors_is_refused(tmp_path, state, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        open_source(save(tmp_path, state))


class Trap:
    def __init__(self, function: Callable, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("trap", "name"),
    [
        (Trap(os.mkdir, "trapped"), "posix.mkdir"),
        (Trap(eval, "__import__('os').mkdir('trapped')"), "__builtin__.eval"),
        (Trap(getattr, Trap(__import__, "os"), "mkdir"), "__builtin__.(getattr|__import__)"),
        (Trap(bytearray, 10**12), "__builtin__.bytearray"),
    ],
)
def test_code_is_refused_and_not_run(tmp_path, monkeypatch, trap, name, legacy):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, {"w": torch.ones(1), "x": trap}, legacy=legacy)
    with pytest.raises(CheckpointError, match=rf"model\.pt: .*it names {name}, which no state dict of tensors holds"):
        open_source(path)
    assert not (tmp_path / "trapped").exists()


def test_newer_pickle_instructions_are_refused(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(b"".join(pickle.dumps(value, protocol=4) for value in (1, 2, {}, Trap(os.mkdir, "trapped"))))
    with pytest.raises(CheckpointError, match="has the instruction STACK_GLOBAL"):
        open_source(path)


def rewritten(path: Path, *, compression: int = zipfile.ZIP_STORED, **replaced: bytes) -> Path:
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression=compression) as archive:
        for name, content in members.items():
            archive.writestr(name, replaced.get(name.rpartition("/")[2], content))
    return path


def test_archive_of_two_states_is_refused(tmp_path):
    """torch reads the first `data.pkl`, and it must be that one which was looked at."""
    path = save(tmp_path, {"w": torch.ones(3)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", pickle.dumps({}, protocol=2))
    with pytest.raises(CheckpointError, match=r"its records lie under more than one name"):
        open_source(path)


def test_a_record_deeper_down_does_not_stand_before_the_one_that_torch_reads(tmp_path):
    path = save(tmp_path, {"w": torch.ones(3)})
    with zipfile.ZipFile(path) as archive:
        (name,) = [item for item in archive.namelist() if item.endswith("data.pkl")]
        harmless = archive.read(name)
    rewritten(path, **{"data.pkl": pickle.dumps(Trap(os.getcwd), protocol=2)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name.replace("data.pkl", "z/data.pkl"), harmless)
    with pytest.raises(CheckpointError, match="it names"):
        open_source(path)


def test_archive_that_inflates_is_refused_before_it_does(tmp_path):
    path = save(tmp_path, {"w": torch.zeros(10_000_000, dtype=torch.uint8)})
    rewritten(path, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    with pytest.raises(CheckpointError, match=r"is deflated, which torch\.save never does"):
        open_source(path)


def test_big_endian_numbers_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="big-endian order, which is not read"):
        open_source(rewritten(save(tmp_path, {"w": torch.ones(3)}), byteorder=b"big"))


def test_storage_of_another_size_is_refused(tmp_path):
    path = rewritten(save(tmp_path, {"w": torch.ones(3)}), **{"0": bytes(8)})
    with pytest.raises(CheckpointError, match="w: its storage of 12 bytes is none of the file's"):
        open_source(path)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_refused(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3)), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="a TorchScript module, whose weights come with code"):
        open_source(tmp_path / "model.pt")


def test_file_cut_after_opening_is_named(tmp_path):
    path = save(tmp_path, {"w": torch.ones(300)})
    source = TorchFileSource.open(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.pt: (the checksum of model/data/0 does not|w ends after)"):
        source.read("w")
