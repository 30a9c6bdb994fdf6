"""A tiny model, its tokenizer and a running engine."""

import functools
import json

import pytest
from flax import nnx
from tiny_llama import CONFIG, LIMITS, VOCABULARY, Warm, make_tokenizer, random_leaves, warm_executor

from pipeline.models.checkpoint import build_model, save_parameters
from pipeline.models.registry import describe_config
from pipeline.serving.engine.engine import Engine
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.grammar.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer, num_tokens=VOCABULARY, stop_ids=(0,))


@pytest.fixture(scope="session")
def model():
    return build_model(describe_config(CONFIG), random_leaves(), dtype="float32", source="test")


@pytest.fixture(scope="session")
def executors(model):
    """By whether prompts and decoding share passes over a cache that is read in place."""
    return functools.cache(lambda is_shared: warm_executor(nnx.clone(model), reads_in_place=is_shared))


@pytest.fixture(scope="session")
def executor(executors):
    return executors(True)


@pytest.fixture(scope="session")
def warm():
    return Warm


@pytest.fixture
def engine(executor, vocabulary):
    made = Engine(Warm(executor), decoder=vocabulary, limits=LIMITS, metrics=Metrics(model="tiny"), strict=True)
    made.start(timeout_seconds=60)
    yield made
    made.stop(drain_seconds=10)


@pytest.fixture
def model_directory(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_parameters(tmp_path / "params", random_leaves())
    return tmp_path
