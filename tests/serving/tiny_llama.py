"""A tiny llama with its tokenizer, the plain loop it is compared with, and a reader of an engine's chunks."""

import functools
import queue
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.models.checkpoint import abstract_leaves
from pipeline.models.packed.calls import support
from pipeline.models.registry import describe_config
from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.executor import ModelExecutor
from pipeline.serving.engine.request import Request, Sampling
from pipeline.serving.engine.scheduler import Limits
from pipeline.serving.engine.token_rules import Chosen

WAIT_SECONDS = 60
VOCABULARY = 320
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
LIMITS = Limits(slots=4, context=160, chunk_tokens=32, decode_steps=4, max_waiting=400, prefix_granularity=16)


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


@functools.partial(nnx.jit)
def last_logits(model, tokens, length):
    return model(tokens)[0, length - 1]


def greedy(model, prompt, num):
    """The plain loop: the whole sequence through the cacheless pass for every token."""
    tokens = list(prompt)
    for _ in range(num):
        padded = np.zeros((1, LIMITS.context), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(jnp.argmax(last_logits(model, padded, len(tokens)))))
    return tokens[len(prompt) :]


def greedy_texts(model, tokenizer, *, prompts, num):
    """What `greedy` gives, as text."""
    return [
        tokenizer.decode(greedy(model, tokenizer.encode(prompt).ids, num), skip_special_tokens=True)
        for prompt in prompts
    ]


class Reader:
    """Collects the chunks of requests."""

    def __init__(self):
        self.chunks = {}
        self.done = queue.Queue()

    def __call__(self, chunks):
        for chunk in chunks:
            self.chunks.setdefault(chunk.request_id, []).append(chunk)
            if chunk.finish is not None:
                self.done.put(chunk.request_id)

    def wait(self, num):
        for _ in range(num):
            self.done.get(timeout=WAIT_SECONDS)

    def wait_for_chunk(self, request_id):
        eventually(lambda: request_id in self.chunks)

    def finish(self, request_id):
        return self.chunks[request_id][-1].finish

    def text(self, request_id):
        return "".join(chunk.text for chunk in self.chunks[request_id])


def prompt_of(length, seed=0):
    return [int(token) for token in np.random.default_rng(seed).integers(1, 320, length)]


def eventually(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Warm:
    """An executor that is warm already, so that each test's engine starts at once."""

    def __init__(self, executor):
        self._executor = executor
        self.buckets = executor.buckets
        self.prefill = executor.prefill
        self.decode = executor.decode
        self.shared = executor.shared
        self.place = executor.place
        self.exchange = executor.exchange
        self.on_host = executor.on_host

    def warm_up(self, *, on_progress=None):
        return 0.0


def request(name, prompt, num, **how):
    return Request(request_id=name, prompt=tuple(prompt), sampling=Sampling(max_tokens=num, temperature=0.0, **how))


class Device:
    """An executor that gives out token 3, and does in between what a test asks for."""

    def __init__(self, limits, *, before_decode=lambda step: None, before_prefill=lambda step: None):
        self.buckets = Buckets.for_limits(
            slots=limits.slots, context=limits.context, chunk_tokens=limits.chunk_tokens, copies_prefixes=True
        )
        self.before_decode, self.before_prefill = before_decode, before_prefill

    def warm_up(self, *, on_progress=None):
        return 0.0

    def prefill(self, step, *, rules):
        self.before_prefill(step)
        return Chosen([3] if step.is_last else [])

    def decode(self, step, *, rules):
        self.before_decode(step)
        return [Chosen([3] * row.budget) for row in step.rows]

    def place(self, leaves):
        return leaves


def warm_executor(model, *, reads_in_place=True):
    """As a replica makes it on a CPU, or elsewhere: with prompts in chunks of their own."""
    buckets = Buckets.for_limits(
        slots=LIMITS.slots,
        context=LIMITS.context,
        chunk_tokens=LIMITS.chunk_tokens,
        smallest_attention=128,
        copies_prefixes=True,
        reads_in_place=reads_in_place and support().attention is not None,
    )
    made = ModelExecutor(
        model, limits=LIMITS, buckets=buckets, mesh=ServingMesh.of(jax.devices("cpu")[0]), dtype="float32"
    )
    made.warm_up()
    return made
