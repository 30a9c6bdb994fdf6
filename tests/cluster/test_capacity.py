"""What can never fit is named."""

import pytest

from pipeline.cluster.capacity import Capacity, Demand, planned_capacity, why_infeasible
from pipeline.cluster.cluster_file import load_cluster
from pipeline.errors import UsageError

LAPTOP = Capacity(cpus=2, gpus=0, memory_bytes=8 * 2**30, source="this machine")


def test_a_request_that_fits_is_fine() -> None:
    assert why_infeasible([Demand(stage="a", cpus=2, gpus=0, memory_bytes=0)], LAPTOP) == []


def test_every_request_that_cannot_fit_is_named_with_both_numbers() -> None:
    lines = why_infeasible(
        [
            Demand(stage="train", cpus=4, gpus=2, memory_bytes=16 * 2**30),
            Demand(stage="serve", cpus=1, gpus=0, memory_bytes=0),
        ],
        LAPTOP,
    )
    assert lines == [
        "stage 'train' asks for 4 CPUs at once; this machine has 2",
        "stage 'train' asks for 2 GPUs at once; this machine has 0",
        "stage 'train' asks for 16.0 GiB at once; this machine has 8.0 GiB",
    ]


def test_visible_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, count in (("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-abc", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert planned_capacity().gpus == count


def test_a_cluster_file_tells_all_its_problems(tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("adress: head:6379\ncpus: -1\n")
    with pytest.raises(UsageError) as raised:
        load_cluster(path)
    for words in ("adress", "cpus", "allowed keys: address"):
        assert words in str(raised.value)


def test_the_shipped_cluster_files_are_right(project) -> None:
    files = sorted((project / "configs" / "clusters").glob("*.yaml"))
    assert files
    for path in files:
        load_cluster(path)
    gpu = load_cluster(project / "configs" / "clusters" / "gpu.yaml")
    assert gpu.capacity(LAPTOP).gpus == 8
