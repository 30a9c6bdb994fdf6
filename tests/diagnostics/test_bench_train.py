"""`pipeline bench train` on a tiny model: the shape of what it says."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.diagnostics import bench_train, bench_train_gang, bench_train_speed
from pipeline.diagnostics.bench_result import BenchResult, BenchRow
from pipeline.diagnostics.bench_train import GROUPS, chosen, run
from pipeline.diagnostics.bench_train_gang import Gang
from pipeline.diagnostics.bench_train_material import Material, Measured
from pipeline.errors import StageError, UsageError

TINY = {
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


HANGING = """
import contextlib, time

class Hanging:
    def advance(self, steps):
        time.sleep(600)

    def barrier(self):
        pass

@contextlib.contextmanager
def enter(worker, job):
    yield Hanging()
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def smaller(material: Material, *, model: Path) -> Material:
    batch = {"global_batch_tokens": 256, "micro_batch_sequences": 2, "sequence_length": 32}
    return replace(material, model=model, vocabulary_size=400, **batch)


def row(*, ours: float, peer: float | None) -> BenchRow:
    return BenchRow(name="x", unit="tokens/s", ours=ours, peer_name="bare", peer=peer, bar=0.95)


def test_a_row_passes_only_by_a_measured_ratio() -> None:
    assert row(ours=95.0, peer=100.0).ok
    assert not row(ours=94.9, peer=100.0).ok
    assert not row(ours=1e9, peer=None).ok
    value = BenchResult(machine={"cores": 2}, rows=(row(ours=50.0, peer=None),)).to_json()
    assert value["rows"][0] == {
        "name": "x",
        "unit": "tokens/s",
        "ours": 50.0,
        "peer_name": "bare",
        "peer": None,
        "ratio": None,
        "bar": 0.95,
        "ok": False,
        "note": "",
    }


def test_a_pattern_names_groups_and_a_wrong_one_is_corrected() -> None:
    assert chosen("") == tuple(GROUPS)
    assert chosen("sp*, none") == ("speed",)
    with pytest.raises(UsageError, match="no rows are called 'sped'") as error:
        chosen("sped")
    assert "speed" in error.value.hint


def test_what_a_library_raises_costs_one_group_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Material) -> Measured:
        raise RuntimeError("the cluster went away")

    def measured(_: Material) -> Measured:
        return Measured(rows=(row(ours=1.0, peer=1.0),))

    monkeypatch.setattr(bench_train, "GROUPS", {"ray": broken, "speed": measured})
    first, second = run().to_json()["rows"]
    assert (first["name"], first["ok"], first["note"]) == ("ray", False, "RuntimeError: the cluster went away")
    assert second["ok"]


@pytest.mark.slow
def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hanging_side.py").write_text(HANGING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bench_train_gang, "END_SECONDS", 0.5)
    with Gang("hanging", "hanging_side:enter", job=None, world_size=2) as gang:
        gang.ask("barrier")
        asked_at = time.monotonic()
        with pytest.raises(StageError, match="hanging did not answer in time"):
            gang.ask("advance", 1, timeout_seconds=0.5)
    assert time.monotonic() - asked_at < 60


@pytest.mark.slow
def test_sides_are_timed_after_they_computed_the_same(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = (bench_train_speed.OURS, bench_train_speed.BARE)
    monkeypatch.setattr(bench_train_speed, "SIDES", {name: bench_train_speed.SIDES[name] for name in only})
    told: list[str] = []
    result = run(rounds=1, only="speed", notice=told.append, adapt=lambda material: smaller(material, model=tiny))
    bare, *absent = result.to_json()["rows"]
    assert bare["ours"] > 0
    assert bare["ratio"] == pytest.approx(bare["ours"] / bare["peer"])
    assert any("bare: losses of steps [1, 5] are ours within" in line for line in told)
    assert [(one["ratio"], one["ok"]) for one in absent] == [(None, False), (None, False)]
    assert result.machine["cores"] >= 1
