"""The engine gives the tokens of the plain model, loses no slot, and never compiles while serving."""

import random
import threading
import time

import jax.numpy as jnp
import pytest
from flax import nnx
from tiny_llama import LIMITS, WAIT_SECONDS, Reader, eventually, greedy, prompt_of

from pipeline.models.packed.calls import support
from pipeline.models.packed.modules import PackedProjection
from pipeline.serving.engine.engine import Engine
from pipeline.serving.engine.engine_thread import EngineUnavailable
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.request import FinishReason, Request, Sampling
from pipeline.serving.engine.token_rules import Chosen


@pytest.fixture(params=[True, False], ids=["shared passes", "chunks"])
def executor(executors, request):
    return executors(request.param)


def asked(name, prompt, num, **how):
    return Request(request_id=name, prompt=tuple(prompt), sampling=Sampling(max_tokens=num, temperature=0.0, **how))


def test_what_serves_on_a_cpu_is_packed_where_it_can_be(executor):
    parameters = executor._parameters
    modules = nnx.iter_modules(parameters.rebuild(parameters.arrays))
    assert any(isinstance(one, PackedProjection) for _, one in modules) == (support().product is not None)


# 16 and 32 are chunk sizes, 128 an attention bucket.
@pytest.mark.parametrize(("length", "num"), [(1, 9), (16, 5), (17, 5), (32, 3), (33, 6), (70, 4), (120, 20), (127, 8)])
def test_one_request_has_the_tokens_of_the_plain_greedy_loop(engine, model, tokenizer, length, num):
    reader = Reader()
    prompt = prompt_of(length, seed=length)
    engine.submit(asked("a", prompt, num), sink=reader)
    reader.wait(1)
    expected = greedy(model, prompt, num)
    assert reader.text("a") == tokenizer.decode(expected)
    assert sum(chunk.num_tokens for chunk in reader.chunks["a"]) == num
    assert reader.finish("a") is FinishReason.LENGTH


def test_eight_requests_of_different_lengths_have_the_tokens_each_has_alone(engine, model, tokenizer):
    reader = Reader()
    wanted = {f"r{index}": (prompt_of(3 + 17 * index, seed=index), 4 + 3 * index) for index in range(8)}
    for name, (prompt, num) in wanted.items():
        engine.submit(asked(name, prompt, num), sink=reader)
    reader.wait(8)
    for name, (prompt, num) in wanted.items():
        assert reader.text(name) == tokenizer.decode(greedy(model, prompt, num)), name


def test_prompts_and_decoding_share_passes_where_the_cache_is_read_in_place(engine, request):
    is_shared = request.node.callspec.params["executor"] and support().attention is not None
    reader = Reader()
    engine.submit(asked("a", prompt_of(40), 30), sink=reader)
    reader.wait_for_chunk("a")
    engine.submit(asked("b", prompt_of(60, seed=1), 5), sink=reader)
    reader.wait(2)
    num = {kind: engine.metrics.value("engine_steps_total", label=kind) for kind in ("shared", "prefill", "decode")}
    assert (num["shared"] > 0, num["prefill"] > 0) == (is_shared, not is_shared) and num["decode"] > 0


def test_nothing_copies_a_layer_of_the_cache_to_write_into_it(executor):
    layer = sum(part.nbytes for part in executor._cache[0])
    for (kind, size, _), compiled in executor._table.items():
        if kind in ("decode", "shared", "prefill"):
            taken = compiled.memory_analysis()
            assert taken.alias_size_in_bytes == len(executor._cache) * layer
            assert taken.temp_size_in_bytes < layer, (kind, size)


def test_a_seed_gives_the_same_text_alone_and_in_company(engine):
    how = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 1234}

    def run(company):
        reader = Reader()
        engine.submit(
            Request(request_id="a", prompt=tuple(prompt_of(9)), sampling=Sampling(max_tokens=24, **how)), sink=reader
        )
        for index in range(company):
            engine.submit(asked(f"c{index}", prompt_of(5 + index, seed=index), 20), sink=reader)
        reader.wait(1 + company)
        return reader.text("a")

    assert run(0) == run(3) == run(0)


def test_a_stop_token_ends_the_completion_and_is_not_part_of_the_text(engine, model, tokenizer):
    prompt = prompt_of(6)
    tokens = greedy(model, prompt, 12)
    stop = tokens[5]
    kept = tokens[: tokens.index(stop)]
    reader = Reader()
    engine.submit(asked("a", prompt, 12, stop_ids=(stop,)), sink=reader)
    reader.wait(1)
    assert reader.finish("a") is FinishReason.STOP
    assert reader.text("a") == tokenizer.decode(kept)


def test_a_stop_string_cuts_the_text_and_frees_the_slot(engine, model, tokenizer):
    prompt = prompt_of(6)
    whole = tokenizer.decode(greedy(model, prompt, 40))
    stop = whole[10:13]
    reader = Reader()
    engine.submit(asked("a", prompt, 40, stop=(stop,)), sink=reader)
    reader.wait(1)
    assert reader.text("a") == whole[: whole.index(stop)]
    assert reader.finish("a") is FinishReason.STOP
    eventually(lambda: engine.why_unbalanced() is None)


def test_nothing_compiles_after_warm_up_whatever_the_shapes(engine):
    rng = random.Random(3)
    reader = Reader()
    for index in range(40):
        length = rng.randint(1, 150)
        how = {"top_k": rng.choice([0, 5]), "top_p": rng.choice([1.0, 0.5]), "seed": index}
        sampling = Sampling(
            max_tokens=rng.randint(1, LIMITS.context - length), temperature=rng.choice([0.0, 0.7]), **how
        )
        engine.submit(Request(request_id=str(index), prompt=tuple(prompt_of(length)), sampling=sampling), sink=reader)
        time.sleep(rng.random() * 0.01)
    reader.wait(40)
    assert engine.status().num_compiles_while_serving == 0
    assert engine.status().failure is None


def test_a_compile_on_the_engine_thread_is_counted_and_fails_a_strict_engine(executor, tokenizer):
    class Compiling:
        buckets = executor.buckets

        def warm_up(self, *, on_progress=None):
            return 0.0

        def prefill(self, step, *, rules):
            nnx.jit(lambda x: x * 3 + len(step.tokens))(jnp.ones(17)).block_until_ready()
            return Chosen([5])

        def shared(self, step, *, rules):
            return [self.prefill(*step.prefills, rules=rules)]

        decode = None

    metrics = Metrics(model="tiny")
    made = Engine(Compiling(), decoder=tokenizer, limits=executor.limits, metrics=metrics, strict=True)
    made.start()
    reader = Reader()
    made.submit(asked("a", [1, 2], 1), sink=reader)
    reader.wait(1)
    eventually(lambda: made.status().failure is not None)
    assert metrics.value("compile_events_total", label="serving") >= 1
    assert "compiles after warm-up" in made.status().failure


def test_an_exception_inside_one_request_fails_that_request_alone(executor, warm, model, tokenizer):
    good, bad = prompt_of(5, seed=1), prompt_of(5, seed=2)
    good_tokens, bad_tokens = greedy(model, good, 12), greedy(model, bad, 12)
    poison = next(token for token in bad_tokens if token not in good_tokens)

    class Touchy:
        def decode(self, ids, *, skip_special_tokens=True):
            if poison in ids:
                raise LookupError("no text for this token")
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    made = Engine(warm(executor), decoder=Touchy(), limits=executor.limits, metrics=Metrics(model="tiny"))
    made.start()
    reader = Reader()
    made.submit(asked("bad", bad, 12), sink=reader)
    made.submit(asked("good", good, 12), sink=reader)
    reader.wait(2)
    assert reader.finish("bad") is FinishReason.ERROR
    assert "no text for this token" in reader.chunks["bad"][-1].error
    assert reader.text("good") == tokenizer.decode(good_tokens)
    assert made.status().failure is None
    eventually(lambda: made.why_unbalanced() is None)
    made.stop(drain_seconds=1)


def test_draining_finishes_what_runs_and_takes_nothing_new(executor, tokenizer, engine):
    reader = Reader()
    engine.submit(asked("a", prompt_of(20), 100), sink=reader)
    stopping = threading.Thread(target=lambda: engine.stop(drain_seconds=WAIT_SECONDS))
    stopping.start()
    eventually(lambda: not engine.status().is_ready)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        engine.submit(asked("b", [1], 1), sink=reader)
    stopping.join()
    assert reader.finish("a") is FinishReason.LENGTH


def test_a_full_queue_refuses(executor, tokenizer, engine):
    reader = Reader()
    with pytest.raises(EngineUnavailable, match="wait already"):
        for index in range(1000):
            engine.submit(asked(str(index), prompt_of(100), 50), sink=reader)
    for index in range(1000):
        engine.cancel(str(index))
    eventually(lambda: engine.why_unbalanced() is None)
