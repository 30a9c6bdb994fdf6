"""Parameters are exchanged between two steps: nothing compiles, no request fails, and the way back is exact."""

import threading

import numpy as np
import pytest
from flax import nnx
from tiny_llama import CONFIG, LIMITS, Reader, eventually, greedy, prompt_of, random_leaves

from pipeline.errors import ParameterError
from pipeline.models.checkpoint import build_model
from pipeline.models.registry import describe_config
from pipeline.serving.engine.engine_thread import EngineUnavailable
from pipeline.serving.engine.request import FinishReason, Request, Sampling


@pytest.fixture(scope="module")
def other():
    return build_model(describe_config(CONFIG), random_leaves(seed=5), dtype="float32", source="test")


@pytest.fixture(scope="module")
def leaves(executor, other):
    return executor.leaves_of(nnx.clone(other))


def request(name, prompt, num):
    return Request(request_id=name, prompt=tuple(prompt), sampling=Sampling(max_tokens=num, temperature=0.0))


def answer(engine, prompt, num):
    reader = Reader()
    engine.submit(request("one", prompt, num), sink=reader)
    reader.wait(1)
    return reader.text("one")


def test_a_swap_changes_the_answers_and_the_old_leaves_bring_them_back(engine, model, other, leaves, tokenizer):
    prompt = prompt_of(40)
    old, new = (tokenizer.decode(greedy(which, prompt, 10)) for which in (model, other))
    assert old != new
    assert answer(engine, prompt, 10) == old
    swapped = engine.swap(leaves)
    assert all(isinstance(leaf, np.ndarray) for leaf in swapped.leaves.values())
    assert answer(engine, prompt, 10) == new
    engine.swap(swapped.leaves)
    assert answer(engine, prompt, 10) == old
    assert engine.status().num_compiles_while_serving == 0


def test_what_runs_ends_with_the_old_parameters_and_what_comes_later_has_the_new(
    engine, model, other, leaves, tokenizer
):
    running, late = prompt_of(20, seed=1), prompt_of(25, seed=2)
    reader = Reader()
    for index in range(LIMITS.slots):
        engine.submit(request(f"run{index}", running, 100), sink=reader)
    reader.wait_for_chunk("run3")
    done = []
    swapping = threading.Thread(target=lambda: done.append(engine.swap(leaves)))
    swapping.start()
    eventually(lambda: engine._swaps)
    engine.submit(request("late", late, 12), sink=reader)
    reader.wait(LIMITS.slots + 1)
    swapping.join()
    assert {reader.text(f"run{index}") for index in range(LIMITS.slots)} == {
        tokenizer.decode(greedy(model, running, 100))
    }
    assert reader.text("late") == tokenizer.decode(greedy(other, late, 12))
    assert done[0].num_cut_over == 0
    engine.swap(done[0].leaves)
    assert engine.why_unbalanced() is None


def test_swaps_under_load_fail_nothing_and_each_answer_is_of_the_version_it_names(
    engine, executor, model, other, leaves, tokenizer
):
    prompts = [prompt_of(40, seed=1)[:30] + prompt_of(4, seed=index) for index in range(4)]
    wanted = {
        label: [tokenizer.decode(greedy(which, prompt, 12)) for prompt in prompts]
        for label, which in (("old", model), ("new", other))
    }
    versions = {"old": executor.on_host(executor.place(executor.leaves_of(nnx.clone(model)))), "new": leaves}
    engine.version = "old"
    reader, names, stops = Reader(), [], threading.Event()

    def ask():
        while not stops.is_set():
            names.append(f"r{len(names)}")
            engine.submit(request(names[-1], prompts[(len(names) - 1) % 4], 12), sink=reader)
            if len(names) > 6:
                reader.wait(1)

    asking = threading.Thread(target=ask)
    asking.start()
    for label in ("new", "old") * 5:
        engine.swap(versions[label], label=label)
    eventually(lambda: len(names) > 30)
    stops.set()
    asking.join()
    reader.wait(6)
    for index, name in enumerate(names):
        assert reader.finish(name) is FinishReason.LENGTH
        (version,) = {chunk.version for chunk in reader.chunks[name]}
        assert reader.text(name) == wanted[version][index % 4]
    assert {chunk.version for chunks in reader.chunks.values() for chunk in chunks} == {"old", "new"}
    assert engine.status().num_compiles_while_serving == 0


def test_a_request_that_outlasts_the_wait_goes_on_with_the_new_parameters(engine, leaves, model, tokenizer):
    prompt = prompt_of(20, seed=1)
    reader = Reader()
    engine.submit(request("long", prompt, 130), sink=reader)
    reader.wait_for_chunk("long")
    swapped = engine.swap(leaves, wait_seconds=0.0)
    assert swapped.num_cut_over == 1
    reader.wait(1)
    assert reader.finish("long") is FinishReason.LENGTH
    assert reader.text("long") != tokenizer.decode(greedy(model, prompt, 130))
    engine.swap(swapped.leaves)


def test_leaves_that_differ_are_named_and_nothing_changes(engine, model, leaves, tokenizer):
    broken = dict(leaves)
    del broken["norm.scale"]
    broken["layers.0.mlp.down_proj.kernel"] = np.zeros((3, 4), np.float32)
    broken["embed_tokens.embedding"] = np.asarray(leaves["embed_tokens.embedding"], np.float16)
    broken["layers.7.norm.scale"] = np.zeros(2, np.float32)
    with pytest.raises(ParameterError) as caught:
        engine.swap(broken)
    message = str(caught.value)
    assert "in 4 leaves" in message
    assert "missing: norm.scale float32[32]" in message
    assert "surplus: layers.7.norm.scale float32[2]" in message
    assert "layers.0.mlp.down_proj.kernel is float32[3, 4], must be float32[64, 32]" in message
    assert "embed_tokens.embedding is float16[320, 32], must be float32[320, 32]" in message
    prompt = prompt_of(10)
    assert answer(engine, prompt, 8) == tokenizer.decode(greedy(model, prompt, 8))


def test_a_stopped_engine_takes_no_parameters(engine, leaves):
    engine.stop(drain_seconds=1)
    with pytest.raises(EngineUnavailable):
        engine.swap(leaves)
