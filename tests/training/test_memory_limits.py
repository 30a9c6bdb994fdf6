"""What a rank may take of its host, read from a file system like that of a container or a scheduler's job."""

from pathlib import Path

import psutil
import pytest

from pipeline.training.memory_limits import MemoryLimit, host_limits, least_of_each

NO_LIMIT = 9223372036854771712
"""What version 1 says of a group without one."""


def host(root: Path, *, cgroup: str, limits: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, "proc/sys/kernel/random/boot_id": "boot\n", **limits}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "limits", "found"),
    [
        pytest.param("", {}, [], id="no groups"),
        pytest.param(
            "0::/job_1/step_0/task_3\n",
            {"sys/fs/cgroup/job_1/step_0/task_3/memory.max": "max\n", "sys/fs/cgroup/job_1/memory.max": "4096\n"},
            [4096],
            id="version 2, of a job above",
        ),
        pytest.param("0::/\n", {"sys/fs/cgroup/memory.max": "512\n"}, [512], id="version 2, of a container"),
        pytest.param(
            "5:memory:/docker/abc\n1:cpu:/docker/abc\n0::/\n",
            {"sys/fs/cgroup/memory/memory.limit_in_bytes": "2048\n"},
            [2048],
            id="version 1, a path that the container does not see",
        ),
        pytest.param(
            "4:cpu,memory:/job\n",
            {
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{NO_LIMIT}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192\n",
            },
            [NO_LIMIT, 8192],
            id="version 1, beside another controller",
        ),
    ],
)
def test_every_group_above_a_process_counts(tmp_path: Path, cgroup: str, limits: dict[str, str], found: list[int]):
    machine, *groups = [limit for limit in host_limits(root=host(tmp_path, cgroup=cgroup, limits=limits)) if limit.key]
    assert (machine.key, machine.total_bytes) == ("boot", psutil.virtual_memory().total)
    assert [group.total_bytes for group in groups] == found
    assert len({limit.key for limit in (machine, *groups)}) == 1 + len(found)
    again = [limit.key for limit in host_limits(root=tmp_path) if limit.key]
    assert again == [limit.key for limit in (machine, *groups)]  # other ranks of the group find the same


def test_a_limit_of_a_process_is_shared_by_nobody() -> None:
    machine = MemoryLimit(place="host", name="the memory of a", key="a", total_bytes=1000)
    own = MemoryLimit(place="host", name="RLIMIT_AS of the process", key="", total_bytes=300)
    assert [least_of_each([machine, own], num_ranks=number) for number in (2, 4)] == [300, 250]
