"""`data.text` as the runner calls it."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from pipeline.data.packed import PackedDataset
from pipeline.errors import ParameterError
from pipeline.stages import text_identity
from pipeline.stages.data_text import run
from pipeline.stages.parameters import DataTextParameters
from pipeline.stages.registry import KINDS

STDLIB_CPU_SECONDS = 15.0
"""Measured: 3 to 4 s of wall clock on two idle cores; CPU time does not depend on what else the machine does."""


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    directory = tmp_path / "texts"
    directory.mkdir()
    for number in range(20):
        (directory / f"{number}.txt").write_text(f"The quick brown fox {number} jumps over the lazy dog. " * 40)
    return directory


def test_it_writes_a_dataset_and_the_metrics_of_its_kind(stage_context, texts: Path) -> None:
    parameters = DataTextParameters(source="texts", vocabulary_size=300, sequence_length=16)
    context = stage_context(parameters, {})
    result = run(context)
    dataset = PackedDataset.open(context.output_root / "dataset")
    assert set(result.metrics) == set(KINDS["data.text"].default_metrics)
    assert result.metrics["num_documents"] == 20
    assert result.metrics["num_train_tokens"] == dataset.num_rows("train") * 16
    assert result.metrics["vocabulary_size"] == dataset.vocabulary_size <= 300
    kinds = [report.kind for report in context.reporter.drain()]
    assert "dataset" in kinds
    assert "progress" in kinds


def test_a_vocabulary_that_the_text_cannot_fill_is_said(stage_context, texts: Path) -> None:
    context = stage_context(DataTextParameters(source="texts", vocabulary_size=5000, sequence_length=16), {})
    result = run(context)
    notes = [report.payload["text"] for report in context.reporter.drain() if report.kind == "note"]
    assert notes == [f"the text has pairs for {int(result.metrics['vocabulary_size'])} tokens only; 5000 were asked"]


def test_a_missing_source_ends_with_exit_code_2(stage_context) -> None:
    with pytest.raises(ParameterError, match="no such file or directory") as caught:
        run(stage_context(DataTextParameters(source="absent.txt"), {}))
    assert caught.value.exit_code == 2


@pytest.mark.slow
def test_the_standard_library_is_packed_in_seconds(stage_context) -> None:
    context = stage_context(DataTextParameters(), {})
    started = time.process_time()
    result = run(context)
    assert time.process_time() - started < STDLIB_CPU_SECONDS
    assert result.metrics["num_train_tokens"] > 1_000_000
    assert result.metrics["vocabulary_size"] == 4096


def test_a_tokenizer_of_a_model_is_taken_and_identified_by_what_is_read_of_it(
    stage_context, texts: Path, tmp_path: Path
) -> None:
    first = stage_context(DataTextParameters(source="texts", vocabulary_size=300, sequence_length=8), {})
    run(first)
    own = first.output_root / "dataset" / "tokenizer.json"
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes(own.read_bytes())
    given = DataTextParameters(source="texts", sequence_length=8, tokenizer="model")
    before = text_identity.digests(given, tmp_path)
    (model / "model.safetensors").write_bytes(b"weights")
    assert text_identity.digests(given, tmp_path) == before
    (model / "config.json").write_text('{"eos_token_id": 1}')
    assert text_identity.digests(given, tmp_path) != before
    before = text_identity.digests(given, tmp_path)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/rag.jinja").write_text("{{ messages }}")
    assert text_identity.digests(given, tmp_path) != before
    (model / "additional_chat_templates/rag.jinja").unlink()
    assert text_identity.digests(given, tmp_path) == before
    by_reference = DataTextParameters(source="texts", sequence_length=8, tokenizer="${stages.base.outputs.checkpoint}")
    context = replace(stage_context(by_reference, {"tokenizer": model}), output_root=tmp_path / "second")
    result = run(context)
    assert PackedDataset.open(tmp_path / "second" / "dataset").eos_token_id == 1
    assert result.metrics["vocabulary_size"] == PackedDataset.open(own.parent).vocabulary_size
    with pytest.raises(ValidationError, match="leave one of them out"):
        DataTextParameters(tokenizer="model", vocabulary_size=400)


def test_conversations_are_rendered_by_the_template_that_serves(stage_context, texts: Path, tmp_path: Path) -> None:
    run(stage_context(DataTextParameters(source="texts", vocabulary_size=300, sequence_length=8), {}))
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes((tmp_path / "outputs" / "dataset" / "tokenizer.json").read_bytes())
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}<|endoftext|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    turns = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps over"}]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": turns, "bad": []}) for _ in range(3)))
    given = {"source": "chats.jsonl", "sequence_length": 8, "tokenizer": "model"}
    context = replace(
        stage_context(DataTextParameters(json_field="messages", **given), {}), output_root=tmp_path / "second"
    )
    run(context)
    dataset = PackedDataset.open(tmp_path / "second" / "dataset")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "user: the fox<|endoftext|>\nassistant: jumps over<|endoftext|>"  # ends once, and asks for no answer
    expected = tokenizer.encode(text).ids
    assert dataset.rows("validation", np.array([0]))[0].tolist() == expected[:9]
    assert dataset.manifest.splits["validation"].num_tokens == len(expected)
    with pytest.raises(ParameterError, match="must hold messages with a role"):
        run(stage_context(DataTextParameters(json_field="bad", **given), {}))
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ParameterError, match="where `tokenizer` names a model with a chat template"):
        run(stage_context(DataTextParameters(json_field="messages", **given), {}))
