"""Model configs, initial weights and tied names."""

import json
from pathlib import Path

import pytest
import torch
from conftest import TINY_MODEL

from pipeline.errors import ParameterError
from pipeline.training.parallel.tied_parameters import tied_names
from pipeline.training.tasks.memory_count import count_parameters
from pipeline.training.tasks.model import (
    build_model,
    check_fits,
    flops_per_token,
    model_config,
    read_model_config,
)


def size(model: torch.nn.Module) -> int:
    return count_parameters(model, []).parameters


def test_the_shipped_config_is_a_llama_of_about_8_million(project: Path) -> None:
    raw = read_model_config(project / "configs" / "models" / "llama-8m.json")
    with torch.device("meta"):
        model = build_model(model_config(raw), seed=0)
    assert raw["model_type"] == "llama"
    assert 7.5e6 < size(model) < 8.5e6


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "cannot be read"),
        ("{", r"config\.json:1:\d+: not JSON"),
        ("[]", "a JSON object is wanted, found list"),
        ("{}", "model_type None is not known"),
        ('{"model_type": "lama"}', "model_type 'lama' is not known to transformers; did you mean 'llama'"),
        ('{"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}', "transformers refuses it"),
    ],
)
def test_a_bad_model_config_is_refused_with_its_place(tmp_path: Path, content: str | None, found: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ParameterError, match=found):
        read_model_config(path)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    typed = model_config(TINY_MODEL)
    torch.manual_seed(5)
    first = build_model(typed, seed=1)
    torch.rand(17)
    second = build_model(typed, seed=1)
    other = build_model(typed, seed=2)
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_model(typed, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_tied_names_point_at_the_name_that_is_kept() -> None:
    tied = build_model(model_config(TINY_MODEL), seed=0)
    assert tied_names(tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    untied = build_model(model_config(TINY_MODEL | {"tie_word_embeddings": False}), seed=0)
    assert tied_names(untied) == {}
    assert size(untied) - size(tied) == 320 * 32


def test_a_lookup_is_no_multiplication() -> None:
    typed = model_config(json.loads(json.dumps(TINY_MODEL)))
    tied = flops_per_token(typed, num_parameters=1000, sequence_length=8)
    assert tied == 6 * 1000 + 12 * 2 * 4 * 8 * 8


def test_all_that_does_not_fit_is_said_with_both_numbers() -> None:
    typed = model_config(TINY_MODEL)
    check_fits(typed, vocabulary_size=320, sequence_length=32)
    with pytest.raises(ParameterError) as caught:
        check_fits(typed, vocabulary_size=4096, sequence_length=256)
    message = caught.value.message
    assert "vocabulary has 4096 tokens, the model's vocab_size is 320" in message
    assert "sequence_length 256, the model's max_position_embeddings is 32" in message
