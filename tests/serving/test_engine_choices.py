"""Penalties, bias, log-probabilities and grammars through the whole engine, held against a plain loop in numpy."""

import json

import jax
import jsonschema
import numpy as np
import pytest
from flax import nnx
from test_structured_matcher import SCHEMAS, compiled
from test_token_choice import by_hand
from tiny_llama import LIMITS, Reader, eventually, greedy, last_logits, prompt_of

from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.engine import Engine
from pipeline.serving.engine.executor import ModelExecutor
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.request import FinishReason, GrammarError, Request, Sampling
from pipeline.serving.engine.scheduler import Limits

# Logits of the cached pass against the pass without a cache, float32; 2e-6 measured.
LOGPROB_TOLERANCE = 2e-5
WISHES = [
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 1.5, "presence_penalty": 0.7},
    {"presence_penalty": -1.0},
    {"logit_bias": {7: 9.0, 11: -100.0, 300: 8.5}, "frequency_penalty": 2.0},
]


def request(name, prompt, num, **how):
    return Request(
        request_id=name, prompt=tuple(prompt), sampling=Sampling(max_tokens=num, **{"temperature": 0.0, **how})
    )


def run(engine, *requests):
    reader = Reader()
    for one in requests:
        engine.submit(one, sink=reader)
    reader.wait(len(requests))
    return reader


def logits_after(model, tokens):
    padded = np.zeros((1, LIMITS.context), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(last_logits(model, padded, len(tokens)))


def by_the_plain_loop(model, prompt, num, sampling):
    tokens = []
    for _ in range(num):
        logits = by_hand(logits_after(model, [*prompt, *tokens]), prompt, tokens, sampling)
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_penalties_and_bias_give_the_tokens_of_the_plain_loop(engine, model, tokenizer, wish):
    prompt = prompt_of(21, seed=2)
    asked = request("a", prompt, 24, **wish)
    plain = request("b", prompt_of(9, seed=3), 24)
    reader = run(engine, asked, plain)
    expected = by_the_plain_loop(model, prompt, 24, asked.sampling)
    assert expected != greedy(model, prompt, 24)
    assert reader.text("a") == tokenizer.decode(expected)
    assert reader.text("b") == tokenizer.decode(greedy(model, prompt_of(9, seed=3), 24))
    assert engine.status().num_compiles_while_serving == 0


def test_log_probabilities_are_those_of_the_model_and_lie_where_the_text_is(engine, model, tokenizer):
    prompt, num = prompt_of(13, seed=4), 20
    reader = run(engine, request("a", prompt, num, logprobs=3), request("b", prompt, num))
    found = [entry for chunk in reader.chunks["a"] for entry in chunk.logprobs]
    tokens, text = greedy(model, prompt, num), reader.text("a")
    assert [entry.chosen.token for entry in found] == tokens
    assert not any(chunk.logprobs for chunk in reader.chunks["b"])
    for index, entry in enumerate(found):
        logits = logits_after(model, [*prompt, *tokens[:index]]).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        best = np.argsort(-logits)[:3]
        assert entry.chosen.logprob == pytest.approx(logprobs[tokens[index]], abs=LOGPROB_TOLERANCE)
        assert [ranked.token for ranked in entry.top] == best.tolist()
        assert [ranked.logprob for ranked in entry.top] == pytest.approx(logprobs[best].tolist(), abs=LOGPROB_TOLERANCE)
        before = tokenizer.decode(tokens[:index]).rstrip("\ufffd")
        assert text[: entry.text_offset] == text[: len(before)]
    assert b"".join(entry.chosen.bytes for entry in found).decode(errors="replace").startswith(text.rstrip("\ufffd"))


def test_a_seed_gives_the_same_text_beside_a_request_with_wishes(engine):
    how = {"temperature": 1.0, "top_k": 40, "min_p": 0.02, "seed": 77}
    alone = run(engine, request("a", prompt_of(9), 24, **how)).text("a")
    company = request("b", prompt_of(30), 40, repetition_penalty=1.2, logprobs=1)
    assert run(engine, request("a", prompt_of(9), 24, **how), company).text("a") == alone


def quiet(tokenizer):
    """A random model would write white space and letters without end."""
    blank = {token: -100.0 for token in range(320) if not tokenizer.decode([token]).strip()}
    closing = {tokenizer.token_to_id(character): 6.0 for character in '"}]'}
    return {**blank, **closing}


def test_texts_of_many_schemas_at_once_are_valid_and_one_that_is_cut_says_so(engine, vocabulary, tokenizer):
    bias = quiet(tokenizer)
    requests = [
        request(
            str(index),
            prompt_of(5 + index, seed=index),
            LIMITS.context - 40,
            temperature=1.0,
            seed=index,
            logit_bias=bias,
            stop_ids=(0,),
            grammar=compiled(vocabulary, "json_schema", schema),
        )
        for index, schema in enumerate(SCHEMAS)
    ]
    reader = run(engine, *requests)
    finished = 0
    for index, schema in enumerate(SCHEMAS):
        if reader.finish(str(index)) is FinishReason.LENGTH:
            continue
        finished += 1
        assert reader.finish(str(index)) is FinishReason.STOP
        jsonschema.validate(json.loads(reader.text(str(index))), schema)
    assert finished >= len(SCHEMAS) * 3 // 4
    assert engine.status().num_compiles_while_serving == 0
    eventually(lambda: engine.why_unbalanced() is None)


def test_a_text_ends_with_its_grammar_or_by_length(engine, vocabulary):
    digits = compiled(vocabulary, "regex", "[0-9]{6}")
    reader = run(engine, request("ends", [5], 20, grammar=digits), request("cut", [5], 3, grammar=digits))
    assert reader.finish("ends") is FinishReason.STOP and len(reader.text("ends")) == 6
    assert reader.finish("cut") is FinishReason.LENGTH and len(reader.text("cut")) == 3
    assert reader.text("ends").startswith(reader.text("cut"))


def test_a_grammar_ends_a_text_of_a_model_without_end_tokens(engine, vocabulary, tokenizer):
    """The mask lets the tokenizer's own end through, and it ends the text though no one listed it."""
    grammar = compiled(vocabulary, "regex", "[0-9]{2}!*")
    reader = run(engine, request("a", [5], 30, grammar=grammar, logit_bias={0: 50.0}, logprobs=0))
    assert reader.finish("a") is FinishReason.STOP
    assert reader.text("a").isdigit() and len(reader.text("a")) == 2


class Breaking:
    """A grammar that meets its limits after some tokens."""

    is_finished = False

    def __init__(self, after):
        self._left = after
        self._mask = np.full(10, 0xFFFFFFFF, np.uint32)

    def start(self):
        if self._left < 0:
            raise GrammarError("too many states before the first token")
        return self

    def accept(self, tokens):
        self._left -= len(tokens)
        if self._left <= 0:
            raise GrammarError("too many states")

    def mask(self):
        return self._mask


def test_a_grammar_that_breaks_fails_its_request_alone(engine, model, tokenizer):
    prompt = prompt_of(8, seed=5)
    reader = run(
        engine,
        request("late", prompt, 30, grammar=Breaking(4)),
        request("early", prompt, 30, grammar=Breaking(-1)),
        request("good", prompt, 30),
    )
    assert reader.finish("late") is reader.finish("early") is FinishReason.ERROR
    assert "too many states" in reader.chunks["late"][-1].error
    assert "before the first token" in reader.chunks["early"][-1].error
    assert reader.text("good") == tokenizer.decode(greedy(model, prompt, 30))
    eventually(lambda: engine.why_unbalanced() is None)
    assert engine.status().failure is None


def test_wishes_at_random_some_of_them_given_up_leave_the_engine_exact(engine, vocabulary):
    rng = np.random.default_rng(8)
    grammar = compiled(vocabulary, "regex", "([a-z]{2} ?)*")
    wishes = [
        *WISHES,
        {},
        {"logprobs": 5},
        {"grammar": grammar, "logprobs": 1},
        {"grammar": grammar, "stop": ("a",)},
        {"temperature": 1.2, "top_p": 0.9, "min_p": 0.01},
    ]
    reader = Reader()
    for index in range(80):
        how = {"stop_ids": (0,), "seed": index, **wishes[rng.integers(len(wishes))]}
        engine.submit(request(str(index), prompt_of(1 + index), int(rng.integers(1, 40)), **how), sink=reader)
        if rng.random() < 0.3:
            engine.cancel(str(rng.integers(index + 1)))
    reader.wait(80)
    eventually(lambda: engine.why_unbalanced() is None)
    assert not {reader.finish(str(index)) for index in range(80)} & {FinishReason.ERROR}
    assert engine.status().num_compiles_while_serving == 0


def test_a_long_context_has_a_shape_for_few_adjusted_tokens(model, tokenizer, vocabulary):
    """The same tokens come from both; what is long is made short here, or the test would take minutes."""
    buckets = Buckets(
        decode_batches=(2,), decode_attention=(160,), chunks=(32,), prefill_attention=(160,), adjusted=(24,)
    )
    limits = Limits(slots=2, context=160, chunk_tokens=32, decode_steps=4, max_logprobs=0)
    mesh = ServingMesh.of(jax.devices("cpu")[0])
    executor = ModelExecutor(nnx.clone(model), limits=limits, buckets=buckets, mesh=mesh, dtype="float32")
    made = Engine(executor, decoder=vocabulary, limits=limits, metrics=Metrics(model="tiny"), strict=True)
    made.start(timeout_seconds=120)
    used = set()
    executor.before_run = lambda key, arguments: used.add(key)
    prompt = prompt_of(14, seed=6)
    asked = request("few", prompt, 40, frequency_penalty=1.0)
    reader = run(made, asked)
    made.stop(drain_seconds=1)
    assert reader.text("few") == tokenizer.decode(by_the_plain_loop(model, prompt, 40, asked.sampling))
    assert made.status().failure is None
    assert executor.is_warm
    assert ("choose", 2, 24) in used


def test_a_stop_string_takes_the_log_probabilities_behind_it_along(engine, model, tokenizer):
    prompt = prompt_of(6)
    whole = tokenizer.decode(greedy(model, prompt, 40))
    stop = whole[10:13]
    reader = run(engine, request("a", prompt, 40, stop=(stop,), logprobs=0))
    text = reader.text("a")
    offsets = [entry.text_offset for chunk in reader.chunks["a"] for entry in chunk.logprobs]
    assert text == whole[: whole.index(stop)]
    assert offsets == sorted(offsets) and max(offsets) < len(text)
    assert all(entry.top == () for chunk in reader.chunks["a"] for entry in chunk.logprobs)
