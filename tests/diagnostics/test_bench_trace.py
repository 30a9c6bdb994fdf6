"""`pipeline bench trace`: what becomes of models, of their processes, and the page that says so."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from pipeline.cli.bench import bench
from pipeline.diagnostics.bench_trace import run, run_all
from pipeline.diagnostics.trace_page import page
from pipeline.diagnostics.trace_speed import speed_row
from pipeline.diagnostics.trace_trial import Ended, Trial, compare, convert, difference, export, run_trial
from pipeline.diagnostics.trace_zoo import ZooEntry, ZooModel, zoo
from pipeline.errors import UsageError

ENTRY = ZooEntry(name="mlp", group="plain modules", source="pipeline.diagnostics.zoo_modules")


def entry(name: str) -> ZooEntry:
    (found,) = zoo(only=name)
    return found


def write_equal(entry: ZooEntry, record: Path) -> None:
    Trial(name=entry.name, group=entry.group, ended=Ended.EQUAL, difference=1e-7).write(record)


def hang(entry: ZooEntry, record: Path) -> None:
    Trial(name=entry.name, group=entry.group, ended=Ended.NOT_CONVERTED, finished=False).write(record)
    time.sleep(600)


def die(entry: ZooEntry, record: Path) -> None:
    Trial(name=entry.name, group=entry.group, ended=Ended.NOT_EXPORTED, finished=False).write(record)
    os.abort()


def die_at_once(_entry: ZooEntry, _record: Path) -> None:
    os._exit(7)


def run_target(target, kept: Path, *, limit_seconds: float = 60.0) -> Trial:
    (trial,) = run_all((ENTRY,), kept=kept, jobs=1, notice=lambda _: None, target=target, limit_seconds=limit_seconds)
    return trial


def test_every_name_of_the_zoo_is_there_once() -> None:
    names = [entry.name for entry in zoo()]
    assert len(names) == len(set(names)) > 600
    assert {"mlp", "unet-bilinear", "llama", "whisper", "bert:BertForMaskedLM"} <= set(names)


def test_patterns_choose_models_by_name_or_group() -> None:
    assert {entry.name for entry in zoo(only="lstm*, bert")} == {
        "lstm",
        "lstm-both-ways",
        "lstm-projected",
        "lstm-cell",
        "bert",
    }
    assert {entry.group for entry in zoo(only="plain*")} == {"plain modules", "plain vision modules"}


@pytest.mark.parametrize("name", ["gru", "unet-transposed", "llama", "qwen2_vl", "swin", "wav2vec2", "clip"])
def test_models_are_built_small_and_random(name: str) -> None:
    model = entry(name).build()
    parameters = dict(model.module.named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) < 2_000_000
    constant = [path for path, value in parameters.items() if value.numel() > 1 and value.unique().numel() == 1]
    assert constant == []
    with torch.no_grad():
        assert model.module(**model.inputs) is not None


def test_an_architecture_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    run_trial(entry("dinat"), tmp_path / "record.json")
    trial = Trial.read(tmp_path / "record.json")
    assert trial.ended is Ended.NOT_BUILT
    assert "natten" in trial.reason


def test_without_torchvision_one_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    run_trial(entry("torchvision"), tmp_path / "record.json")
    trial = Trial.read(tmp_path / "record.json")
    assert trial.ended is Ended.NOT_BUILT
    assert "torchvision does not import beside torch" in trial.reason


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    trial = Trial(
        name="x",
        group="g",
        ended=Ended.UNSUPPORTED,
        reason="aten.foo",
        unsupported={"aten.foo": 2},
        seconds={"build": 1},
    )
    trial.write(tmp_path / "record.json")
    assert Trial.read(tmp_path / "record.json") == trial


class Halved(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x @ self.weight, "positive": x > 0}


def test_a_trial_compares_what_both_compute() -> None:
    model = ZooModel(module=Halved().eval(), inputs={"x": torch.randn(3, 2)})
    exported, is_open = export(model, again=lambda: model)
    assert is_open
    traced = convert(model, exported)
    assert compare(model, traced, fewer_rows=True) < 1e-6
    with torch.no_grad():
        model.module.weight[0, 1] = 2.5
    assert compare(model, traced, fewer_rows=True) > 1e-2


def test_differences_are_relative_to_the_largest_value() -> None:
    reference = torch.tensor([-4.0, 1.0, float("-inf"), float("nan")])
    assert difference([-4.0, 1.5, float("-inf"), float("nan")], reference) == pytest.approx(0.125)
    assert difference([-4.0, 1.0, 3.0, float("nan")], reference) == float("inf")
    assert difference([1, 2], torch.tensor([1, 2])) == 0.0
    assert difference([1, 3], torch.tensor([1, 2])) == float("inf")


@pytest.mark.slow
def test_a_model_that_hangs_is_a_row_at_the_step_it_was_in(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    run_target(write_equal, tmp_path / "first")  # the process that others are forked from imports torch once
    trial = run_target(hang, tmp_path, limit_seconds=5.0)
    assert (trial.ended, trial.exported, trial.passed) == (Ended.NOT_CONVERTED, True, False)
    assert "took more than" in trial.reason


@pytest.mark.slow
def test_a_model_that_kills_its_process_is_a_row(tmp_path: Path) -> None:
    trial = run_target(die, tmp_path)
    assert (trial.ended, trial.exported) == (Ended.NOT_EXPORTED, False)
    assert trial.reason == "its process ended with signal 6"
    (tmp_path / "other").mkdir()
    assert run_target(die_at_once, tmp_path / "other").reason == "its process ended with exit code 7"


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    first = run_target(write_equal, tmp_path)
    assert first.passed
    told: list[str] = []
    again = run_all((ENTRY,), kept=tmp_path, jobs=1, notice=told.append, target=die)
    assert again == [first]
    assert told == []


TRIALS = (
    Trial(name="a", group="plain modules", ended=Ended.EQUAL, difference=2e-7, num_parameters=1234, open_batch=True),
    Trial(name="b", group="plain modules", ended=Ended.DIFFERENT, difference=0.5),
    Trial(name="c", group="transformers", ended=Ended.NOT_EXPORTED, reason="a | b <c>"),
    Trial(name="d", group="transformers", ended=Ended.UNSUPPORTED, reason="aten.foo", unsupported={"aten.foo": 3}),
)


def test_the_page_counts_and_shows_every_model() -> None:
    text = page(TRIALS, bar=0.8, limit_seconds=150)
    assert "| plain modules | 2 | 2 | 2 | 2 | 1 | 50.0% |" in text
    assert "| **all** | 4 | 4 | 3 | 2 | 1 | 33.3% |" in text
    assert "| `a` | 1,234 | yes | open | yes | 2.0e-07 | yes |" in text
    assert "not exported: a \\| b &lt;c>" in text
    assert "| `aten.foo` | 1 |" in text
    assert all(line.count("|") - line.count("\\|") == 10 for line in text.splitlines() if line.startswith("| `a`"))


@pytest.mark.slow
def test_two_models_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = bench(name="trace", rounds=1, only="mlp,embedding-bag-max", store=None, as_json=True, no_tracking=True)
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert [item["model"] for item in value["details"]] == ["mlp", "embedding-bag-max"]
    (row,) = value["rows"]
    assert (row["ours"], row["peer"], row["ok"], code) == (2.0, 2.0, True, 0)
    assert "[2/2]" in captured.err
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == ["embedding-bag-max.json", "mlp.json"]


@pytest.mark.slow
def test_the_traced_forward_is_measured_against_the_familys(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 1010, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 256}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    row = speed_row(rounds=1, model=tmp_path / "tiny.json")
    assert row.ours > 0
    assert row.peer is not None
    assert row.peer > 0


def test_options_of_another_bench_are_refused() -> None:
    with pytest.raises(UsageError, match="bench train has no --jobs, --update-docs"):
        bench(name="train", rounds=1, jobs=2, update_docs=True, store=None, as_json=True, no_tracking=True)


def test_a_failing_share_is_below_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.diagnostics.bench_trace.run_all", lambda *_args, **_options: list(TRIALS))
    (row,) = run(only="mlp", work=tmp_path).rows
    assert (row.ours, row.peer, row.ok) == (1.0, 3.0, False)


def test_the_page_renews_the_rows_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "page.md"
    zoo_of_two = [ZooEntry(name=name, group="g", source="none") for name in "ab"]
    monkeypatch.setattr("pipeline.diagnostics.bench_trace.PAGE", written)
    monkeypatch.setattr(
        "pipeline.diagnostics.bench_trace.zoo", lambda only="": [e for e in zoo_of_two if only in e.name]
    )
    ended = iter([Ended.EQUAL, Ended.DIFFERENT, Ended.EQUAL])
    monkeypatch.setattr(
        "pipeline.diagnostics.bench_trace.run_all",
        lambda entries, **_options: [Trial(name=e.name, group="g", ended=next(ended), difference=0.0) for e in entries],
    )
    run(only="a", update_docs=True, work=tmp_path)
    assert "| **all** | 2 | 1 | 1 | 1 | 1 | 100.0% |" in written.read_text()
    assert "Not measured yet: 1 models." in written.read_text()
    run(only="b", update_docs=True, work=tmp_path)
    assert "| **all** | 2 | 2 | 2 | 2 | 1 | 50.0% |" in written.read_text()
    run(only="b", update_docs=True, work=tmp_path)
    assert "| **all** | 2 | 2 | 2 | 2 | 2 | 100.0% |" in written.read_text()


def test_a_pattern_that_no_model_matches_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model is called 'nothing'"):
        run(only="nothing", work=tmp_path)
