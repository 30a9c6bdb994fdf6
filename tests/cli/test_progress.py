"""Progress is told on standard error: a bar on a terminal, a line now and then in a pipe, or not at all."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from converters.parity_report import BlockAgreement
from pipeline.cli import progress
from pipeline.cli.agreement import BAR_WIDTH, MAX_ROWS, _shown, log_bar

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = """
from pipeline.cli.progress import following
with following("tensors") as told:
    for done in range(1, 6):
        told(done, 5)
print("result")
"""


def test_a_pipe_gets_a_line_now_and_then(capsys, monkeypatch):
    now = iter([0.0, 1.0, 6.0, 7.0, 12.5])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.following("tensors") as told:
        for done in (1, 2, 3):
            told(done, 4)
        told(4, 4, "levels compared")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["2/4 tensors", "4/4 levels compared"]


def test_quiet_is_quiet(capsys):
    with progress.following("tensors", quiet=True) as told:
        told(1, 2)
        told(2, 2, "all")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_that_leaves_results_alone():
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=theirs, text=True, cwd=PROJECT, check=True
    )
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.stdout == "result\n"
    assert "tensors" in shown
    assert "5/5" in shown


@pytest.mark.parametrize(
    ("value", "filled"),
    [(0.0, 0), (1e-12, 0), (1e-9, 0), (1e-6, 10), (1e-3, 20), (1.0, 30), (50.0, 30), (float("inf"), 30)],
)
def test_an_error_is_a_bar_on_a_log_scale_with_its_limit(value, filled):
    bar = log_bar(value, limit=1e-5)
    assert len(bar) == BAR_WIDTH
    assert bar.index("|") == 13
    assert bar.count("█") == filled - (filled > 13)


def test_of_many_blocks_the_ends_and_the_worst_are_shown():
    errors = [1e-7] * 200
    errors[111] = 1e-2
    blocks = [
        BlockAgreement(name=f"layers.{i}", torch_name="t", shape=(1,), max_relative=error, mean_relative=error)
        for i, error in enumerate(errors)
    ]
    names = [block.name if block else "..." for block in _shown(blocks)]
    assert names[0] == "layers.0"
    assert names[-1] == "layers.199"
    assert names[MAX_ROWS // 2 : MAX_ROWS // 2 + 3] == ["...", "layers.111", "..."]
    assert [block.name for block in _shown(blocks[:MAX_ROWS]) if block] == [f"layers.{i}" for i in range(MAX_ROWS)]
