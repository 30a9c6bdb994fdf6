"""A tiny model, its tokenizer and a running engine."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.models.checkpoint import abstract_leaves, build_model, save_parameters
from pipeline.models.registry import describe_config
from pipeline.serving.buckets import Buckets
from pipeline.serving.engine import Engine
from pipeline.serving.executor import ModelExecutor
from pipeline.serving.metrics import Metrics
from pipeline.serving.scheduler import Limits

VOCABULARY = 320
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
LIMITS = Limits(slots=4, context=160, chunk_tokens=32, decode_steps=4, max_waiting=400)


def random_leaves(seed=0, scale=0.25):
    rng = np.random.default_rng(seed)
    return {
        path: (np.ones(leaf.shape) if path.endswith("scale") else rng.normal(size=leaf.shape) * scale).astype(
            np.float32
        )
        for path, leaf in abstract_leaves(describe_config(CONFIG)).items()
    }


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def main():\n    return the other thing in it\n" * 20], trainer)
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def model():
    return build_model(describe_config(CONFIG), random_leaves(), dtype="float32", source="test")


@pytest.fixture(scope="session")
def executor(model):
    copy = nnx.clone(model)
    buckets = Buckets.for_limits(
        slots=LIMITS.slots, context=LIMITS.context, chunk_tokens=LIMITS.chunk_tokens, smallest_attention=128
    )
    made = ModelExecutor(copy, limits=LIMITS, buckets=buckets, device=jax.devices("cpu")[0], dtype="float32")
    made.warm_up()
    return made


class Warm:
    """An executor that is warm already, so that each test's engine starts at once."""

    def __init__(self, executor):
        self._executor = executor
        self.buckets = executor.buckets
        self.prefill = executor.prefill
        self.decode = executor.decode

    def warm_up(self, *, on_progress=None):
        return 0.0


@pytest.fixture(scope="session")
def warm():
    return Warm


@pytest.fixture
def engine(executor, tokenizer):
    made = Engine(Warm(executor), decoder=tokenizer, limits=LIMITS, metrics=Metrics(model="tiny"), strict=True)
    made.start(timeout_seconds=60)
    yield made
    made.stop(drain_seconds=10)


@pytest.fixture
def model_directory(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_parameters(tmp_path / "params", random_leaves())
    return tmp_path
