"""A served model without weights: a text's embedding is the number of its tokens."""

import contextlib

import numpy as np

from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.micro_batcher import BatchLimits, MicroBatcher
from pipeline.serving.http.embedding_http import EMBEDDING, EmbeddingSurface
from pipeline.serving.http.embedding_request import EmbeddingModel


class Lengths:
    """Executor of a micro-batcher."""

    num_executables = 1

    def warm_up(self, *, on_progress=None):
        return 0.0

    def bucket(self, length):
        return 64

    def run(self, rows):
        return [{EMBEDDING: np.asarray([len(row.inputs["input_ids"]), 1.0], np.float32)} for row in rows]


class Characters:
    """A tokenizer that gives each character a token."""

    def encode(self, sequence, *, add_special_tokens=True):
        return type("Encoding", (), {"ids": [ord(letter) % 320 for letter in sequence]})


@contextlib.contextmanager
def served_lengths(name="lengths", *, encoder=None, max_tokens=40, **more):
    """The surface of one, running."""
    batcher = MicroBatcher(
        Lengths(), limits=BatchLimits(max_batch_rows=8, wait_seconds=0.0), metrics=Metrics(model=name)
    )
    batcher.start(timeout_seconds=30)
    model = EmbeddingModel(name=name, max_tokens=max_tokens, num_tokens=320, size=2)
    yield EmbeddingSurface(engine=batcher, encoder=encoder or Characters(), model=model, facts={}, **more)
    batcher.stop(drain_seconds=5)
