"""`data.mixture` and `data.stream` as the runner calls them."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.dataset import open_dataset
from pipeline.errors import ArtifactError, ParameterError
from pipeline.stages.data_mixture import run as mix
from pipeline.stages.data_stream import run as stream
from pipeline.stages.data_text import run as pack
from pipeline.stages.parameters import DataMixtureParameters, DataStreamParameters, DataTextParameters
from pipeline.stages.reference import OutputReference
from pipeline.stages.registry import KINDS
from pipeline.stages.stream_identity import digests


def mixture_of(*names: str, weights: dict[str, float]) -> DataMixtureParameters:
    datasets = {name: OutputReference(stage=name, output="dataset") for name in names}
    return DataMixtureParameters(datasets=datasets, weights=weights)


def test_a_mixture_holds_its_datasets_and_takes_no_space(stage_context, tiny_dataset: Path) -> None:
    inputs = {"datasets.web": tiny_dataset, "datasets.code": tiny_dataset}
    context = stage_context(mixture_of("web", "code", weights={"web": 0.75, "code": 0.25}), inputs)
    result = mix(context)
    mixture = open_dataset(context.output_root / "dataset")
    assert set(result.metrics) == set(KINDS["data.mixture"].default_metrics)
    assert result.facts["parts"] == {"code": 1, "web": 3}
    sources, _ = mixture.row_at(np.arange(400), seed=0)
    assert np.bincount(sources).tolist() == [100, 300]
    shard = "train-00000.npy"
    assert (context.output_root / "dataset/parts/web" / shard).samefile(tiny_dataset / shard)
    notes = [report.payload["text"] for report in context.reporter.drain() if report.kind == "note"]
    assert notes == ["mixture: code 25.00%, web 75.00%"]


def test_a_text_dataset_takes_the_tokenizer_of_another_so_that_both_mix(
    stage_context, tiny_dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(6):
        (tmp_path / f"texts/{number}.txt").write_text(f"number {number} is here\n" * 40)
    reference = OutputReference(stage="code", output="dataset")
    parameters = DataTextParameters(source="texts", tokenizer=reference, sequence_length=32)
    context = stage_context(parameters, {"tokenizer": tiny_dataset})
    pack(context)
    prose = context.output_root / "dataset"
    prose.rename(tmp_path / "prose")
    inputs = {"datasets.code": tiny_dataset, "datasets.prose": tmp_path / "prose"}
    result = mix(stage_context(mixture_of("code", "prose", weights={"code": 1, "prose": 1}), inputs))
    assert result.facts["parts"] == {"code": 1, "prose": 1}


def test_weights_under_other_names_are_told_together(stage_context, tiny_dataset: Path) -> None:
    context = stage_context(mixture_of("web", "code", weights={"web": 1, "coed": 1}), {})
    with pytest.raises(ParameterError, match="no weight for 'code'; no dataset 'coed'; did you mean 'code'"):
        mix(context)


def test_a_streamed_dataset_has_the_rows_of_the_one_at_its_source(
    stage_context, tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    context = stage_context(DataStreamParameters(source=str(tiny_dataset), shuffled_shards=1), {})
    result = stream(context)
    assert set(result.metrics) == set(KINDS["data.stream"].default_metrics)
    output = context.output_root / "dataset"
    assert sorted(path.name for path in output.iterdir()) == ["manifest.json", "tokenizer.json"]
    streamed, local = open_dataset(output), open_dataset(tiny_dataset)
    chosen = np.arange(local.num_rows("validation"))
    assert np.array_equal(streamed.rows("validation", chosen), local.rows("validation", chosen))


def test_a_changed_source_has_another_identity_and_a_missing_one_is_said(tiny_dataset: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_dataset, copy)
    parameters = DataStreamParameters(source="copy")
    before = digests(parameters, tmp_path)
    shutil.copytree(copy, tmp_path / "elsewhere/copy")
    assert digests(parameters, tmp_path / "elsewhere") != before  # the output says where its shards are
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"seed": 9}))
    assert digests(parameters, tmp_path) != before
    with pytest.raises(ParameterError, match=r"manifest\.json cannot be read"):
        digests(DataStreamParameters(source="absent"), tmp_path)


@pytest.mark.parametrize("content", ["no json", '{"kind": "arrays", "schema": 1}', '{"schema": 1}'])
def test_a_source_that_is_no_text_dataset_is_refused(stage_context, tmp_path: Path, content: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/manifest.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        stream(stage_context(DataStreamParameters(source="source"), {}))
