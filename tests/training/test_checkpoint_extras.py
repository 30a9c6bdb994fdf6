"""What is kept beside model and optimizer: restored as it was, whatever kind of value it is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_functions import Recorder, stored_tensors

from pipeline.errors import CheckpointError
from pipeline.training.loop import advance, initial_state
from pipeline.training.session import open_session
from pipeline.training.worker import joined


class Counter:
    """A tensor and a plain value, as a moving average and a number of skipped steps are."""

    def __init__(self, average: float, skips: int) -> None:
        self.average, self.skips = torch.full((3,), average), skips

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "skips": self.skips, "words": {"last": "why"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.skips = state["average"], state["skips"]


def test_extras_come_back_as_they_were(make_job, one_rank, tmp_path: Path) -> None:
    job, reporter = make_job(steps=1), Recorder()
    with joined(one_rank):
        session = open_session(one_rank, job)
        session = replace(session, checkpointer=replace(session.checkpointer, extras={"counter": Counter(0.25, 7)}))
        _, commit = advance(session, reporter, state=initial_state(session, reporter), until=1)
        assert commit is not None
        found = Counter(0.0, 0)
        checkpointer = replace(session.checkpointer, extras={"counter": found})
        resumed = checkpointer.resume(reporter, identity=session.identity)
        assert resumed is not None
        assert (found.average.tolist(), found.skips) == ([0.25] * 3, 7)
        missing = replace(session.checkpointer, extras={"other": found})
        with pytest.raises(CheckpointError, match=r"extras\.other"):
            missing.resume(reporter, identity=session.identity)
    assert stored_tensors(tmp_path / "workspace", commit)["extras/counter/skips"] == 7
