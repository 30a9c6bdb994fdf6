"""A decoder in int8 goes through the same executables, and versions of it are exchanged as others are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.errors import ParameterError
from pipeline.models.checkpoint import abstract_leaves, build_model
from pipeline.models.decoders.quantized import quantize_projections
from pipeline.models.registry import describe_config
from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.executor import ModelExecutor
from pipeline.serving.engine.request import Sampling
from pipeline.serving.engine.scheduler import Decode, DecodeRow, Limits, Prefill
from pipeline.serving.engine.token_rules import TokenRules

DESCRIPTION = describe_config(
    {
        "model_type": "qwen2",
        "vocab_size": 101,
        "hidden_size": 80,
        "intermediate_size": 120,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }
)
FORWARD = jax.jit(lambda model, tokens: model(tokens))
PROMPT = tuple(range(3, 11))
GREEDY = TokenRules(Sampling(max_tokens=5, temperature=0.0), prompt=PROMPT)


def in_float(seed):
    rng = np.random.default_rng(seed)
    leaves = {
        path: (rng.normal(size=leaf.shape) * 0.3 + path.endswith("scale")).astype(np.float32)
        for path, leaf in abstract_leaves(DESCRIPTION).items()
    }
    return build_model(DESCRIPTION, leaves, dtype="float32", source="test")


def make(seed):
    return quantize_projections(in_float(seed))


@pytest.fixture(scope="module")
def executor():
    made = ModelExecutor(
        make(1),
        limits=Limits(slots=1, context=32, chunk_tokens=8, decode_steps=4),
        buckets=Buckets(decode_batches=(1,), decode_attention=(32,), chunks=(8,), prefill_attention=(32,)),
        mesh=ServingMesh.of(jax.devices("cpu")[0]),
        dtype="float32",
    )
    made.warm_up()
    return made


def continued(executor):
    step = Prefill(request_id="a", slot=0, tokens=PROMPT, start=0, is_last=True, padded_to=8, attention_length=32)
    (first,) = executor.prefill(step, rules=GREEDY).tokens
    row = DecodeRow(request_id="a", slot=0, token=first, position=8, budget=4)
    (found,) = executor.decode(Decode(rows=(row,), steps=4, padded_to=1, attention_length=32), rules=[GREEDY])
    return [first, *found.tokens]


def plainly_continued(model):
    tokens = list(PROMPT)
    for _ in range(5):
        padded = jnp.asarray([tokens + [0] * (13 - len(tokens))])  # causal: what follows is not seen
        tokens.append(int(np.asarray(FORWARD(model, padded))[0, len(tokens) - 1].argmax()))
    return tokens[8:]


def test_the_engine_s_tokens_are_those_of_the_quantized_module_and_follow_an_exchange(executor):
    first = continued(executor)
    assert first == plainly_continued(make(1))
    before = executor.exchange(executor.place(executor.leaves_of(make(2))))
    assert continued(executor) == plainly_continued(make(2))
    executor.exchange(executor.place(executor.on_host(before)))
    assert continued(executor) == first
    assert {str(array.dtype) for array in before} == {"int8", "float32"}


def test_float_weights_do_not_enter_an_int8_executor(executor):
    with pytest.raises(ParameterError, match=r"qkv_proj\.kernel"):
        executor.place(executor.leaves_of(in_float(2)))
