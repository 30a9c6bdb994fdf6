"""`deterministic`: the same bits alone, in a full batch, and after a prefix hit."""

import os
from pathlib import Path

import jax
import pytest
from flax import nnx
from tiny_llama import LIMITS, Reader, prompt_of

from pipeline.diagnostics.bench_serve_material import Material
from pipeline.models.checkpoint import load_model
from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.engine import Engine
from pipeline.serving.engine.executor import ModelExecutor
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.request import Request, Sampling
from pipeline.serving.engine.scheduler import Limits
from pipeline.serving.engine.tokenizer_file import read_tokenizer
from pipeline.serving.grammar.vocabulary import Vocabulary

DETERMINISTIC = Limits(
    slots=8, context=160, chunk_tokens=32, decode_steps=4, prefix_granularity=16, is_deterministic=True, max_logprobs=5
)
NUM_TOKENS = 24
TEXT = """def moving_average(values, window):
    \"\"\"The mean of each `window` values that stand side by side.\"\"\"
    if window < 1:
        raise ValueError(f"window is {window}, must be at least 1")
    total, means = sum(values[:window]), []
    for left, right in zip(values, values[window:]):
        means.append(total / window)
        total += right - left
"""
HOW = {
    "greedy": {"temperature": 0.0, "logprobs": 5},
    "drawn": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 99, "logprobs": 5},
    "drawn without logprobs": {"temperature": 1.3, "seed": 7},
}


@pytest.fixture(scope="module")
def deterministic_executor(model):
    return warm_executor(nnx.clone(model))


@pytest.fixture(scope="module")
def real_directory():
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch-jax-pipeline-tests"
    cache.mkdir(parents=True, exist_ok=True)
    return Material(work=cache, notice=lambda text: None).flax_decoder


def warm_executor(model):
    buckets = Buckets.for_limits(
        slots=8, context=160, chunk_tokens=32, smallest_attention=128, copies_prefixes=True, is_deterministic=True
    )
    mesh = ServingMesh.of(jax.devices("cpu")[0])
    made = ModelExecutor(model, limits=DETERMINISTIC, buckets=buckets, mesh=mesh, dtype="float32")
    made.warm_up()
    assert buckets.num_executables == 5
    return made


def engine_of(executor, warm, vocabulary, limits):
    engine = Engine(warm(executor), decoder=vocabulary, limits=limits, metrics=Metrics(model="tiny"), strict=True)
    engine.start(timeout_seconds=60)
    return engine


def ask(engine, prompt, how, *, company=0, shared=0):
    """Text and every reported number of one request that runs with `company` others, which begin as it does."""
    reader = Reader()
    for index in range(company):
        other = prompt[:shared] + prompt_of(5 + 11 * index, seed=50 + index)
        wish = Sampling(max_tokens=20 + 3 * index, temperature=0.5 * (index % 3), seed=index)
        engine.submit(Request(request_id=f"c{index}", prompt=tuple(other), sampling=wish), sink=reader)
    wish = Sampling(max_tokens=NUM_TOKENS, **how)
    engine.submit(Request(request_id="one", prompt=tuple(prompt), sampling=wish), sink=reader)
    reader.wait(1 + company)
    numbers = [
        (each.chosen.token, each.chosen.logprob, tuple((top.token, top.logprob) for top in each.top))
        for chunk in reader.chunks["one"]
        for each in chunk.logprobs
    ]
    return reader.text("one"), numbers


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("length", [20, 64, 75])
def test_alone_in_a_batch_of_eight_and_after_a_hit_every_bit_is_the_same(
    deterministic_executor, warm, vocabulary, length, name
):
    prompt = prompt_of(length, seed=length)
    engine = engine_of(deterministic_executor, warm, vocabulary, DETERMINISTIC)
    try:
        alone = ask(engine, prompt, HOW[name])
        assert engine.metrics.value("prefix_cache_hits_total") == 0
        after_a_hit = ask(engine, prompt, HOW[name])
        hits = engine.metrics.value("prefix_cache_hits_total")
        assert hits == (length - 1) // DETERMINISTIC.chunk_tokens * DETERMINISTIC.chunk_tokens
        in_company = ask(engine, prompt, HOW[name], company=7, shared=40)
    finally:
        engine.stop(drain_seconds=10)
    engine = engine_of(deterministic_executor, warm, vocabulary, DETERMINISTIC)
    try:
        in_company_without_a_hit = ask(engine, prompt, HOW[name], company=7)
    finally:
        engine.stop(drain_seconds=10)
    assert alone == after_a_hit == in_company == in_company_without_a_hit
    if "logprobs" in HOW[name]:
        assert len(alone[1]) == NUM_TOKENS


@pytest.mark.slow
def test_real_weights_give_the_same_bits_alone_after_a_hit_and_in_a_batch_of_eight(real_directory, warm):
    executor = warm_executor(load_model(real_directory, dtype="float32"))
    tokenizer = read_tokenizer(real_directory, num_tokens=49152)
    vocabulary = Vocabulary(tokenizer, num_tokens=49152, stop_ids=())
    prompt = tokenizer.encode(TEXT).ids[:75]
    engine = engine_of(executor, warm, vocabulary, DETERMINISTIC)
    try:
        alone = ask(engine, prompt, HOW["drawn"])
        after_a_hit = ask(engine, prompt, HOW["drawn"])
        assert engine.metrics.value("prefix_cache_hits_total") == 64
        in_company = ask(engine, prompt, HOW["drawn"], company=7, shared=40)
    finally:
        engine.stop(drain_seconds=10)
    assert alone == after_a_hit == in_company
    assert len(alone[1]) == NUM_TOKENS


def test_without_it_the_tokens_agree_though_their_numbers_may_differ_in_the_last_bits(
    executor, deterministic_executor, warm, vocabulary
):
    answers = []
    for made, limits in ((executor, LIMITS), (deterministic_executor, DETERMINISTIC)):
        engine = engine_of(made, warm, vocabulary, limits)
        answers += [ask(engine, prompt_of(75), HOW["greedy"], company=company) for company in (0, 3)]
        engine.stop(drain_seconds=10)
    assert len({text for text, _ in answers}) == 1
    assert answers[2] == answers[3]
    for numbers in zip(*(numbers for _, numbers in answers), strict=True):
        assert max(one[1] for one in numbers) - min(one[1] for one in numbers) < LOGPROB_TOLERANCE


LOGPROB_TOLERANCE = 2e-5
"""Of float32 sums in another order; 2e-6 measured."""
