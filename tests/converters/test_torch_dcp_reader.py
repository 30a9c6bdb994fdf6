"""DCP directories are read by their metadata alone: model subtree only, any world size, damage named."""

import os
import pickle
import random
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from converters.readers import open_source
from converters.torch_dcp_reader import TorchDcpSource
from pipeline.errors import CheckpointError

STATE = {
    "norm.weight": torch.arange(5.0),
    "half.weight": torch.tensor([[1.0, -2.5], [0.0, 3.0]], dtype=torch.bfloat16),
    "scalar": torch.tensor(4.0, dtype=torch.float16),
}


def save(directory: Path, state: dict, *, one_file: bool = True) -> Path:
    writer = FileSystemWriter(directory / "dcp", single_file_per_rank=one_file)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return directory


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path / "checkpoint", {"model": STATE, "optimizer": {"exp_avg": torch.ones(7), "lr": 0.1}})


def shard(directory: Path) -> Path:
    (path,) = (directory / "dcp").glob("*.distcp")
    return path


def test_only_the_model_is_seen_and_every_dtype_kept(saved):
    source = open_source(saved)
    assert source.format == "torch-dcp"
    assert set(source.headers) == set(STATE)
    assert {name: header.dtype for name, header in source.headers.items()} == {
        "norm.weight": "float32",
        "half.weight": "bfloat16",
        "scalar": "float16",
    }
    for name, tensor in STATE.items():
        array = source.read(name)
        assert array.shape == tuple(tensor.shape)
        assert str(array.dtype) == source.headers[name].dtype
        assert (array.astype(np.float32) == tensor.float().numpy()).all()


def test_optimizer_bytes_are_never_read(tmp_path):
    state = {"model": STATE, "optimizer": {"exp_avg": torch.ones(7)}}
    directory = save(tmp_path / "checkpoint", state, one_file=False)
    metadata = pickle.loads((directory / "dcp" / ".metadata").read_bytes())
    places = {index.fqn: info.relative_path for index, info in metadata.storage_data.items()}
    (directory / "dcp" / places["optimizer.exp_avg"]).unlink()
    assert (TorchDcpSource.open(directory).read("norm.weight") == np.arange(5)).all()


def test_plain_directory_of_a_bare_state_dict(tmp_path):
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "plain", no_dist=True)
    source = open_source(tmp_path / "plain")
    assert set(source.headers) == set(STATE)
    assert source.directory == tmp_path  # the config lies beside or above


def _train_one_rank(rank: int, world: int, port: int, directory: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    # 5 rows over 2 or 4 ranks are uneven, 1 row leaves the other ranks empty.
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1), torch.nn.BatchNorm1d(1))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    state, root = model.state_dict(), Path(directory)
    optimizer = {"state": {name: {"exp_avg": torch.ones_like(value)} for name, value in state.items()}}
    dcp.save({"model": state, "optimizer": optimizer}, checkpoint_id=str(root / "nested" / "dcp"))
    dcp.save(dict(state), checkpoint_id=str(root / "flat"))
    dcp.save({"app": {"model": state, "optim": optimizer, "step": 3}}, checkpoint_id=str(root / "app"))
    writer = HuggingFaceStorageWriter(str(root / "safetensors"), save_distributed=True)
    dcp.save(dict(state), storage_writer=writer)
    if rank == 0:
        torch.save(whole, root / "whole.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_of_fsdp_are_read_by_one_process_without_a_group(tmp_path, world):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_train_one_rank, args=(world, port, str(tmp_path)), nprocs=world)
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for name, num_files in {"nested": 0, "flat": world, "app": world, "safetensors": world}.items():
        source = open_source(tmp_path / name)
        assert len(list((tmp_path / name).glob("*.*"))) >= num_files
        assert source.format == ("safetensors" if name == "safetensors" else "torch-dcp")
        assert set(source.headers) == set(whole)
        assert all((source.read(key) == value.numpy()).all() for key, value in whole.items())
        assert source.headers["2.num_batches_tracked"].dtype == "int64"
    assert len(list((tmp_path / "nested" / "dcp").glob("*.distcp"))) == world
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"model": STATE, "model_state_dict": STATE}, r"several parts could be the model: 'model', 'model_state_dict'"),
        ({"app": {"model": STATE}, "model": STATE}, r"several parts could be the model: 'app\.model', 'model'"),
        ({"generator": STATE, "critic": STATE}, "no tensor under 'model', .*; it holds: critic, generator"),
    ],
)
def test_model_that_is_not_the_only_one_is_refused_with_what_there_is(tmp_path, state, complaint):
    directory = save(tmp_path / "checkpoint", state)
    with pytest.raises(CheckpointError, match=complaint):
        open_source(directory)


def test_missing_metadata_is_named(saved):
    (saved / "dcp" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata: missing.*\n.*interrupted while it was saved"):
        open_source(saved)


def test_truncated_metadata_is_named(saved):
    path = saved / "dcp" / ".metadata"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"\.metadata: not readable as DCP metadata"):
        open_source(saved)


def test_missing_and_truncated_shards_are_all_named(tmp_path):
    directory = save(tmp_path / "checkpoint", {"model": STATE, "optimizer": {}}, one_file=False)
    first, second, _ = sorted((directory / "dcp").glob("*.distcp"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:100])
    with pytest.raises(CheckpointError) as caught:
        open_source(directory)
    assert f"{first}: shard is missing" in str(caught.value)
    assert re.search(rf"{second}: shard is truncated: 100 bytes, the model needs \d+", str(caught.value))


def test_flipped_bytes_are_an_error_that_names_the_shard(saved):
    """Each tensor's bytes are inside a checksummed archive: damage anywhere in them must not pass."""
    path = shard(saved)
    content = bytearray(path.read_bytes())
    place = content.find(np.arange(5, dtype=np.float32).tobytes())
    content[place + 5] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=rf"{path}: the bytes of norm.weight at offset \d+ are damaged"):
        TorchDcpSource.open(saved).read("norm.weight")


def test_swapped_shards_do_not_pass(tmp_path):
    state = {"model": {"a": torch.zeros(4), "b": torch.zeros(2, 2)}}
    directory = save(tmp_path / "checkpoint", state, one_file=False)
    first, second = sorted((directory / "dcp").glob("*.distcp"))
    one, two = first.read_bytes(), second.read_bytes()
    size = max(len(one), len(two))
    first.write_bytes(two.ljust(size, b"\0"))
    second.write_bytes(one.ljust(size, b"\0"))
    source = TorchDcpSource.open(directory)
    with pytest.raises(CheckpointError):
        source.read("a")


class _Trap:
    def __reduce__(self):
        return (os.mkdir, ("trapped",))


def test_metadata_cannot_run_code(saved, monkeypatch):
    monkeypatch.chdir(saved)
    (saved / "dcp" / ".metadata").write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir, which no DCP metadata holds"):
        open_source(saved)
    assert not (saved / "trapped").exists()


def test_damaged_bytes_never_pass_and_never_crash(saved):
    """Random flips and cuts of a shard: the right numbers or an error that names the file."""
    path = shard(saved)
    content = path.read_bytes()
    expected = {name: open_source(saved).read(name).tobytes() for name in STATE}
    rng = random.Random(0)
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 2, 8])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.2:
            del damaged[rng.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        try:
            source = open_source(saved)
            outcomes.add({name: source.read(name).tobytes() for name in STATE} == expected)
        except CheckpointError as error:
            assert path.name in str(error)
            outcomes.add("error")
    assert outcomes == {True, "error"}  # a flip in the optimizer's bytes or in padding changes nothing


def test_metadata_of_the_wrong_form_is_named(saved):
    path = saved / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata["model.norm.weight"].properties
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata: damaged DCP metadata: AttributeError"):
        open_source(saved)


def test_lost_part_of_a_tensor_is_an_error(saved):
    path = saved / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["model.norm.weight"].size = torch.Size([6])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"model.norm.weight: its parts hold 5 of 6 numbers"):
        open_source(saved)


def test_part_larger_than_its_bytes_is_an_error(saved):
    """A shape that no memory holds is refused before memory is asked for."""
    path = saved / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    stored = metadata.state_dict_metadata["model.norm.weight"]
    stored.size = stored.chunks[0].sizes = torch.Size([2**50])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"norm.weight: the part \(1125899906842624,\) at .* does not fit the"):
        open_source(saved)


def test_metadata_that_takes_memory_is_refused_unread(saved):
    """CPython allocates 16 bytes for each place of the memo up to the one an instruction names."""
    (saved / "dcp" / ".metadata").write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")
    with pytest.raises(CheckpointError, match=r"writes to place 2147483647 of the memo, which no pickler does"):
        open_source(saved)


def test_place_outside_of_the_checkpoint_is_refused(saved):
    path = saved / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="points outside of the checkpoint"):
        open_source(saved)


def test_checkpoint_without_a_model_says_what_it_holds(tmp_path):
    directory = save(tmp_path / "checkpoint", {"weights": STATE, "optimizer": {"step": torch.ones(1)}})
    with pytest.raises(CheckpointError, match=r"no tensor under 'model', .*; it holds: optimizer, weights"):
        open_source(directory)


def test_directory_without_a_checkpoint_says_what_is_allowed(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(CheckpointError, match=r"found: notes.txt\n.*allowed: dcp/"):
        open_source(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        open_source(tmp_path / "absent")


def test_dtype_that_is_not_read_is_refused_by_name(tmp_path):
    source = open_source(
        save(tmp_path / "checkpoint", {"w": torch.zeros(4, dtype=torch.uint8).view(torch.float8_e4m3fnuz)})
    )
    with pytest.raises(CheckpointError, match="w has dtype float8_e4m3fnuz, which is not read; allowed: float32"):
        source.read("w")
