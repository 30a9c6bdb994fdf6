"""`pipeline bench train` on a tiny model: the shape of what it says."""

import json
from pathlib import Path

import pytest

from pipeline.diagnostics.bench_result import BenchResult, BenchRow
from pipeline.diagnostics.bench_train import run


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


@pytest.mark.slow
def test_both_loops_are_measured_in_one_run(tmp_path: Path) -> None:
    model = tmp_path / "tiny.json"
    config = {"model_type": "llama", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
    model.write_text(json.dumps(config))
    result = run(
        rounds=1,
        steps=2,
        model=model,
        global_batch_tokens=256,
        micro_batch_sequences=2,
        sequence_length=32,
        vocabulary_size=400,
    )
    (measured,) = result.to_json()["rows"]
    assert measured["ours"] > 0
    assert measured["peer"] > 0
    assert measured["ratio"] == pytest.approx(measured["ours"] / measured["peer"])
    assert result.machine["cores"] >= 1
