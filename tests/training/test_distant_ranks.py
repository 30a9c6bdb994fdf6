"""Two ranks that share no disk: each has a directory of its own, and there is S3 between them."""

import functools
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rank_functions import Recorder, train_recorded

from pipeline.artifacts.store import open_store
from pipeline.data.packed import PackedDataset
from pipeline.errors import ClusterError
from pipeline.training.checkpoints.commit import find_resumable
from pipeline.training.faults.failpoints import VARIABLE
from pipeline.training.launch.preflight import met
from pipeline.training.launch.spawn import spawn
from pipeline.training.loop import TrainResult, train
from pipeline.training.session import TrainJob
from pipeline.training.worker import WorkerContext

TIMEOUT_SECONDS = 120.0
WORLD_TOLERANCE = 5e-5
"""Relative; float32 sums in another order. Measured: 4e-6 after 6 steps."""


@dataclass
class OnHost:
    """What one rank saw, and what it left on its host."""

    preflight: str
    result: TrainResult
    losses: dict[int, float]
    scratch: list[str]


def train_on_a_host(worker: WorkerContext, job: TrainJob, hosts: str, rows: str) -> OnHost:
    """Train in a directory that no other rank knows, with a copy of the data that no other rank has."""
    own = Path(hosts, f"host-{worker.rank}")
    (own / "scratch").mkdir(parents=True)
    shutil.copytree(rows, own / "rows")
    os.chdir(own)
    tempfile.tempdir = str(own / "scratch")
    recorder = Recorder()
    alone = replace(job, open_dataset=functools.partial(PackedDataset.open, Path("rows")))
    worker, found = met(replace(worker, local_rank=0), workspace=job.workspace)
    result = train(worker, alone, reporter=recorder)
    scratch = [path.relative_to(own / "scratch").as_posix() for path in (own / "scratch").rglob("*") if path.is_file()]
    return OnHost(preflight=str(found), result=result, losses=recorder.series("loss"), scratch=scratch)


def test_ranks_without_a_common_disk_train_commit_and_resume_through_s3(
    make_job, one_rank, s3: str, token_rows: Path, tmp_path: Path, monkeypatch
) -> None:
    def start(hosts: str) -> list[OnHost]:
        job = make_job(workspace=s3)
        arguments = (job, str(tmp_path / hosts), str(token_rows))
        return spawn(train_on_a_host, *arguments, world_size=2, timeout_seconds=TIMEOUT_SECONDS)

    monkeypatch.setenv(VARIABLE, "step_done@rank=1@step=4:kill")
    with pytest.raises(ClusterError, match="rank 1 died"):
        start("before")
    assert [item.key.step for item in find_resumable(open_store(s3)).commits] == [3]
    monkeypatch.delenv(VARIABLE)
    first, second = start("after")  # on other hosts, which have nothing
    assert first.preflight.startswith("pre-flight: 2 ranks reach each other")
    assert first.result.state == second.result.state
    assert (first.result.resumed_from_step, first.result.state.step, sorted(first.losses)) == (3, 6, [4, 5, 6])
    for host in (first, second):  # each fetched what it resumed from, and let it go again
        assert [name.split("/")[1] for name in host.scratch] == [".locks"]
    found = find_resumable(open_store(s3))
    assert ([item.key.step for item in found.commits], found.num_uncommitted, found.rejected) == ([6, 3], 0, ())
    _, alone = train_recorded(one_rank, make_job(workspace=tmp_path / "alone"))
    assert first.losses == pytest.approx({step: alone.series("loss")[step] for step in (4, 5, 6)}, rel=WORLD_TOLERANCE)
