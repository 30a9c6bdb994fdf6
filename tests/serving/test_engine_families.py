"""Families with windows, softcaps, learned positions or experts go through the same engine."""

import jax
import numpy as np
import pytest
from compiler import compiler_is_missing
from flax import nnx

from pipeline.models.decoders.model import Decoder
from pipeline.models.decoders.readers import read_decoder
from pipeline.models.packed.calls import support
from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.executor import ModelExecutor
from pipeline.serving.engine.request import Request, Sampling
from pipeline.serving.engine.scheduler import Decode, DecodeRow, Limits, Prefill, Scheduler
from pipeline.serving.engine.token_rules import TokenRules

SIZES = {
    "vocab_size": 101,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
FAMILIES = {
    "gpt2": {**SIZES, "n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "mixtral": {**SIZES, "num_local_experts": 5, "sliding_window": 7},
}
LIMITS = Limits(slots=1, context=32, chunk_tokens=8, decode_steps=4)
PROMPT = tuple(range(3, 17))


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_chunks_and_decode_give_the_tokens_of_the_plain_model(family):
    config = read_decoder({"model_type": family, **FAMILIES[family]})
    model = nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(1)))()
    plain = nnx.clone(model)
    buckets = Buckets.for_limits(slots=1, context=32, chunk_tokens=8)
    executor = ModelExecutor(
        model, limits=LIMITS, buckets=buckets, mesh=ServingMesh.of(jax.devices("cpu")[0]), dtype="float32"
    )
    executor.warm_up()
    greedy = TokenRules(Sampling(max_tokens=9, temperature=0.0), prompt=PROMPT)
    for start in (0, 8):
        chunk = PROMPT[start : start + 8]
        step = Prefill(
            request_id="a",
            slot=0,
            tokens=chunk,
            start=start,
            is_last=start == 8,
            padded_to=8,
            attention_length=32,
        )
        first = executor.prefill(step, rules=greedy)
    tokens = [*PROMPT, *first.tokens]
    for _ in range(2):
        row = DecodeRow(request_id="a", slot=0, token=tokens[-1], position=len(tokens) - 1, budget=4)
        step = Decode(rows=(row,), steps=4, padded_to=1, attention_length=32)
        tokens += executor.decode(step, rules=[greedy])[0].tokens
    logits = nnx.jit(lambda model, tokens: model(tokens))(plain, np.asarray([tokens], np.int32))
    expected = np.argmax(logits[0], axis=-1)[len(PROMPT) - 1 : -1]
    assert tokens[len(PROMPT) :] == expected.tolist()
    assert len(set(tokens[len(PROMPT) :])) > 2  # the same token over and over would prove little


IN_PLACE = {
    "gpt2": {**FAMILIES["gpt2"], "hidden_size": 64, "n_embd": 64},
    "mixtral": {**FAMILIES["mixtral"], "head_dim": 16},
}


@pytest.mark.parametrize("family", IN_PLACE)
def test_prompts_that_share_passes_get_the_tokens_of_the_plain_model(family):
    if support().attention is None:
        compiler_is_missing(support().reason)
    config = read_decoder({"model_type": family, **IN_PLACE[family]})
    model = nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(1)))()
    plain = nnx.clone(model)
    limits = Limits(slots=2, context=32, chunk_tokens=8, decode_steps=4)
    has_experts = config.experts is not None
    buckets = Buckets.for_limits(slots=2, context=32, chunk_tokens=8, reads_in_place=True, has_experts=has_experts)
    mesh = ServingMesh.of(jax.devices("cpu")[0])
    executor = ModelExecutor(model, limits=limits, buckets=buckets, mesh=mesh, dtype="float32")
    executor.warm_up()
    scheduler = Scheduler(limits, buckets=buckets)
    whole = {"a": list(range(3, 8)), "b": list(range(30, 47)), "c": list(range(60, 77))}
    num_new = {"a": 4, "b": 12, "c": 9}
    lengths = {name: len(one) for name, one in whole.items()}
    rules = {
        name: TokenRules(Sampling(max_tokens=num_new[name], temperature=0.0), prompt=tuple(one))
        for name, one in whole.items()
    }
    for name, one in whole.items():
        scheduler.add(Request(request_id=name, prompt=tuple(one), sampling=rules[name].sampling), now=0.0)
    num_mixed = 0
    while scheduler.has_work:
        scheduler.admit(now=0.0)
        progress = []
        if (step := scheduler.next_shared()) is not None:
            num_mixed += bool(step.rows)
            chosen = dict(
                zip(step.asking, executor.shared(step, rules=[rules[one] for one in step.asking]), strict=True)
            )
            if step.decode is not None:
                progress += scheduler.decoded(step.decode, tokens=[chosen[row.request_id].tokens for row in step.rows])
            for one in step.prefills:
                tokens = chosen[one.request_id].tokens if one.is_last else []
                progress += filter(None, [scheduler.prefilled(one, tokens=tokens)])
        else:
            decode = scheduler.next_decode()
            made = executor.decode(decode, rules=[rules[row.request_id] for row in decode.rows])
            progress += scheduler.decoded(decode, tokens=[one.tokens for one in made])
        for one in progress:
            whole[one.request_id] += one.tokens
    assert num_mixed > 1
    for name, tokens in whole.items():
        logits = nnx.jit(lambda model, tokens: model(tokens))(plain, np.asarray([tokens], np.int32))
        assert tokens[lengths[name] :] == np.argmax(logits[0], axis=-1)[lengths[name] - 1 : -1].tolist()
        assert len(tokens) == lengths[name] + num_new[name]
