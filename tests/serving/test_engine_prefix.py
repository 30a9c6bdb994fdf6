"""Prompts that begin alike are computed once, and their tokens stay those of the plain model."""

import jax
import pytest
from tiny_llama import LIMITS, Reader, eventually, greedy, prompt_of

from pipeline.serving.engine.request import Request, Sampling

GRANULARITY = LIMITS.prefix_granularity


@pytest.fixture(params=[True, False], ids=["shared passes", "chunks"])
def executor(executors, request):
    return executors(request.param)


@pytest.fixture
def ask(engine):
    """Runs a prompt alone; the reader, and how many of its tokens were found in the cache."""

    def run(prompt, num=8):
        before = engine.metrics.value("prefix_cache_hits_total")
        reader = Reader()
        engine.submit(asked("a", prompt, num), sink=reader)
        reader.wait(1)
        return reader.text("a"), int(engine.metrics.value("prefix_cache_hits_total") - before)

    return run


def asked(name, prompt, num):
    return Request(request_id=name, prompt=tuple(prompt), sampling=Sampling(max_tokens=num, temperature=0.0))


def test_the_second_prompt_with_a_beginning_computes_the_rest_alone(ask, model, tokenizer):
    shared = prompt_of(70, seed=1)
    first, second = shared + prompt_of(9, seed=2), shared + prompt_of(20, seed=3)
    assert ask(first) == (tokenizer.decode(greedy(model, first, 8)), 0)
    assert ask(second) == (tokenizer.decode(greedy(model, second, 8)), 70 // GRANULARITY * GRANULARITY)
    assert ask(first)[1] == (len(first) - 1) // GRANULARITY * GRANULARITY


def test_the_next_turn_finds_the_generated_tokens_too(ask, model, tokenizer):
    prompt = prompt_of(30, seed=4)
    ask(prompt, num=40)
    longer = prompt + greedy(model, prompt, 40) + prompt_of(10, seed=5)
    # The last generated token was never an input, so 69 are cached.
    assert ask(longer) == (tokenizer.decode(greedy(model, longer, 8)), 69 // GRANULARITY * GRANULARITY)


def test_eight_choices_of_one_prompt_compute_it_once(engine, model, tokenizer):
    prompt = prompt_of(100, seed=6)
    reader = Reader()
    for index in range(8):
        engine.submit(asked(f"c{index}", prompt, 12), sink=reader)
    reader.wait(8)
    assert {reader.text(f"c{index}") for index in range(8)} == {tokenizer.decode(greedy(model, prompt, 12))}
    assert engine.metrics.value("prefix_cache_queries_total") == 800
    assert engine.metrics.value("prefix_cache_hits_total") == 7 * (99 // GRANULARITY * GRANULARITY)
    assert engine.status().num_compiles_while_serving == 0


def test_a_copy_moves_the_positions_and_not_the_cache(executor):
    for length in executor.buckets.copies:
        memory = executor._table["copy", 1, length].memory_analysis()
        moved = sum(part.nbytes // part.shape[0] // part.shape[2] * length for part in jax.tree.leaves(executor._cache))
        assert memory.temp_size_in_bytes <= moved
        assert memory.alias_size_in_bytes == sum(part.nbytes for part in jax.tree.leaves(executor._cache))


def test_a_prompt_that_runs_is_a_source_and_goes_on_unharmed(engine, model, tokenizer):
    shared = prompt_of(64, seed=7)
    long, short = shared + prompt_of(3, seed=8), shared + prompt_of(5, seed=9)
    reader = Reader()
    engine.submit(asked("long", long, 80), sink=reader)
    reader.wait_for_chunk("long")
    engine.submit(asked("short", short, 30), sink=reader)
    reader.wait(2)
    assert reader.text("long") == tokenizer.decode(greedy(model, long, 80))
    assert reader.text("short") == tokenizer.decode(greedy(model, short, 30))
    assert engine.metrics.value("prefix_cache_hits_total") == 64


def test_new_parameters_reuse_nothing_that_the_old_ones_computed(ask, engine, executor):
    prompt = prompt_of(80, seed=10)
    ask(prompt)
    engine.swap(executor.on_host(executor._parameters.arrays))
    assert ask(prompt)[1] == 0
    assert ask(prompt)[1] == 79 // GRANULARITY * GRANULARITY
    eventually(lambda: engine.why_unbalanced() is None)
