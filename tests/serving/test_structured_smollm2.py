"""Real weights under a grammar: SmolLM2-135M-Instruct answers in valid JSON, and in words it was shown."""

import asyncio
import json
import os
from pathlib import Path

import jax
import jsonschema
import pytest
from tiny_llama import Reader

from pipeline.diagnostics.bench_serve_material import Material
from pipeline.models.checkpoint import load_model
from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.engine import Engine
from pipeline.serving.engine.executor import ModelExecutor
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.request import FinishReason, Request, Sampling
from pipeline.serving.engine.scheduler import Limits
from pipeline.serving.engine.tokenizer_file import read_tokenizer
from pipeline.serving.grammar.response_format import Constraint
from pipeline.serving.grammar.structured_grammar import GrammarCompiler
from pipeline.serving.grammar.vocabulary import Vocabulary

pytestmark = pytest.mark.slow
LIMITS = Limits(slots=4, context=256, chunk_tokens=64, decode_steps=4)
END = 2
TEXT = "Marie Curie was born in Warsaw in 1867. She won the Nobel Prize in Physics and in Chemistry."
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "prizes": {"type": "array", "items": {"enum": ["Physics", "Chemistry", "Peace"]}, "maxItems": 3},
    },
    "required": ["name", "born", "prizes"],
    "additionalProperties": False,
}
ANSWERS = {
    "person": ("json_schema", PERSON, f"{TEXT} Write this as JSON with name, born and prizes."),
    "answer": ("regex", "(yes|no)", "Is Paris a city in France? Answer yes or no."),
    "sum": ("grammar", 'start: NUMBER "+" NUMBER\nNUMBER: /[0-9]{1,2}/', "Write a small sum, like 3+4."),
}


@pytest.fixture(scope="module")
def served():
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch-jax-pipeline-tests"
    cache.mkdir(parents=True, exist_ok=True)
    directory = Material(work=cache, notice=lambda text: None).flax_decoder
    model = load_model(directory, dtype="float32")
    num_tokens = model.config.vocab_size
    tokenizer = read_tokenizer(directory, num_tokens=num_tokens)
    vocabulary = Vocabulary(tokenizer, num_tokens=num_tokens, stop_ids=(END,))
    buckets = Buckets(decode_batches=(4,), decode_attention=(256,), chunks=(64,), prefill_attention=(256,))
    mesh = ServingMesh.of(jax.devices("cpu")[0])
    executor = ModelExecutor(model, limits=LIMITS, buckets=buckets, mesh=mesh, dtype="float32")
    engine = Engine(executor, decoder=vocabulary, limits=LIMITS, metrics=Metrics(model="smollm2"), strict=True)
    engine.start()
    compiler = GrammarCompiler(vocabulary)
    yield engine, tokenizer, compiler
    compiler.close()
    engine.stop(drain_seconds=0)


def test_answers_are_what_their_grammars_say_and_what_the_text_says(served):
    engine, tokenizer, compiler = served
    reader = Reader()
    for name, (kind, text, question) in ANSWERS.items():
        constraint = Constraint(kind=kind, text=text if isinstance(text, str) else json.dumps(text), field=kind)
        grammar = asyncio.run(compiler.compile(constraint))
        prompt = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        sampling = Sampling(max_tokens=150, temperature=0.0, stop_ids=(END,), grammar=grammar, logprobs=2)
        engine.submit(Request(request_id=name, prompt=tuple(prompt), sampling=sampling), sink=reader)
    reader.wait(len(ANSWERS))
    assert {reader.finish(name) for name in ANSWERS} == {FinishReason.STOP}
    person = json.loads(reader.text("person"))
    jsonschema.validate(person, PERSON)
    assert "Curie" in person["name"] and "Physics" in person["prizes"]
    assert reader.text("answer") == "yes"
    left, _, right = reader.text("sum").partition("+")
    assert left.isdigit() and right.isdigit()
    assert engine.status().num_compiles_while_serving == 0
