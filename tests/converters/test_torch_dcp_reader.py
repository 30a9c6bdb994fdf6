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
from torch.distributed.checkpoint import FileSystemWriter
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


def _train_one_rank(rank: int, port: int, directory: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    # 5 rows over 2 ranks are uneven, 1 row leaves the second rank empty.
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(Path(directory) / "dcp"))
    if rank == 0:
        torch.save(whole, Path(directory) / "whole.pt")
    dist.destroy_process_group()


def test_two_fsdp_ranks_are_read_by_one_process_without_a_group(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_train_one_rank, args=(port, str(tmp_path)), nprocs=2)
    source = TorchDcpSource.open(tmp_path)
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    assert not dist.is_initialized()
    assert set(source.headers) == set(whole)
    assert all((source.read(name) == value.numpy()).all() for name, value in whole.items())


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
    with pytest.raises(CheckpointError, match=r"no tensor under 'model'; it holds: optimizer, weights"):
        open_source(directory)


def test_directory_without_a_checkpoint_says_what_is_allowed(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(CheckpointError, match=r"found: notes.txt\n.*allowed: dcp/"):
        open_source(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        open_source(tmp_path / "absent")
