"""`pipeline estimate` on the shipped flow: kinds, a verdict, and what changes it."""

import json
from pathlib import Path

from pipeline.cli import estimate
from pipeline.data.document import Document
from pipeline.data.packing import PackingPlan, write_dataset
from pipeline.data.split import split
from pipeline.diagnostics import estimate_stage

PROJECT = Path(__file__).resolve().parents[2]
STATE_BYTES = 12
"""Of a parameter: itself and AdamW's two moments in float32."""


def estimated_text(monkeypatch, tmp_path: Path, **given) -> int:
    rows = tmp_path / "rows"
    if not rows.exists():
        rows.mkdir()
        text = (PROJECT / "pipeline" / "cli" / "main.py").read_text()
        documents = [Document(name=str(number), text=text) for number in range(4)]
        plan = PackingPlan(vocabulary_size=300, sequence_length=64, shard_tokens=50_000, seed=0)
        write_dataset(split(documents, seed=0, validation_fraction=0.3), rows, plan=plan, source={})
    monkeypatch.setattr(estimate, "stage_inputs", lambda *_, **__: {"dataset": (rows, "digest")})
    options = {"stage": "", "memory_gb": None, "overrides": [], "store": str(tmp_path / "store"), "as_json": False}
    return estimate.run(flow_path=PROJECT / "flows" / "llm.yaml", **(options | given))


def estimated(capsys, monkeypatch, tmp_path: Path, **given) -> tuple[int, dict]:
    code = estimated_text(monkeypatch, tmp_path, as_json=True, **given)
    return code, json.loads(capsys.readouterr().out)


def test_the_shipped_flow_fits_here_and_not_into_a_tenth_of_a_gigabyte(capsys, monkeypatch, tmp_path: Path) -> None:
    code, found = estimated(capsys, monkeypatch, tmp_path)
    assert (code, found["ok"]) == (0, True)
    assert found["trained"] == found["parameters"] > 7_000_000
    held = found["bytes"]["parameters"] + found["bytes"]["optimizer"]
    assert held == STATE_BYTES * found["parameters"] // found["workers"]
    assert found["peak_bytes"] == sum(found["bytes"].values()) > held
    code, found = estimated(capsys, monkeypatch, tmp_path, memory_gb=0.1)
    assert (code, found["ok"], found["available_bytes"]) == (1, False, 100_000_000)


def test_gpus_that_are_left_open_are_those_of_this_machine(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(estimate_stage, "num_cuda_devices", lambda: 0)
    _, on_cpu = estimated(capsys, monkeypatch, tmp_path)
    monkeypatch.setattr(estimate_stage, "num_cuda_devices", lambda: 8)
    _, on_gpu = estimated(capsys, monkeypatch, tmp_path)
    assert (on_cpu["device"], on_gpu["device"]) == ("cpu", "cuda")
    assert "libraries" not in on_gpu["bytes"]
    assert on_gpu["available_bytes"] is None
    estimated_text(monkeypatch, tmp_path)
    assert "computed for GPU ranks" in " ".join(capsys.readouterr().out.split())
