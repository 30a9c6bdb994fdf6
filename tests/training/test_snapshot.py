"""A snapshot is a copy: of every kind of value, in buffers that are used again, and of a GPU's memory too."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pipeline.training.checkpoints.snapshot import Snapshots
from pipeline.training.launch.spawn import free_port

ON_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_CUDA)])
def mesh(request: pytest.FixtureRequest):
    backend = "gloo" if request.param == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield init_device_mesh(request.param, (1,))
    dist.destroy_process_group()


def test_a_snapshot_keeps_what_was_there_and_uses_its_buffers_again(mesh) -> None:
    device = mesh.device_type
    weight = distribute_tensor(torch.arange(12.0, device=device).reshape(4, 3), mesh, [Shard(0)])
    scale = distribute_tensor(torch.tensor(2.0, device=device), mesh, [Replicate()])  # without dimensions
    state = {"model": {"weight": weight, "scale": scale, "step": torch.tensor(7)}, "rates": [0.1, 0.2], "none": None}
    snapshots = Snapshots()
    taken = snapshots.take(state)
    with torch.no_grad():
        weight.mul_(0.0)
        scale.mul_(0.0)
        state["model"]["step"] += 1
        state["rates"][0] = 9.0
    model = taken["model"]
    assert isinstance(model["weight"], DTensor)
    assert model["weight"].placements == weight.placements
    assert model["weight"].to_local().tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert (model["scale"].to_local().item(), model["step"].item()) == (2.0, 7)
    assert (taken["rates"], taken["none"]) == ([0.1, 0.2], None)
    for tensor in (model["weight"].to_local(), model["scale"].to_local(), model["step"]):
        assert tensor.device.type == "cpu"
        assert not tensor.requires_grad
    assert model["weight"].to_local().is_pinned() == (device == "cuda")

    again = snapshots.take(state)["model"]
    assert again["weight"].to_local().data_ptr() == model["weight"].to_local().data_ptr()
    assert again["weight"].to_local().count_nonzero() == 0
    other = {"weight": distribute_tensor(torch.ones(5, 3, device=device), mesh, [Shard(0)])}
    assert snapshots.take({"model": other})["model"]["weight"].to_local().shape == (5, 3)
