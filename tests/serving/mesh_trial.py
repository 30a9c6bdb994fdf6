"""Run in a process with four CPU devices: each family on a mesh, against one device. Prints one JSON object."""

import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from pipeline.models.checkpoint import abstract_leaves, build_model, load_model, model_leaves, save_parameters
from pipeline.models.decoders.layout import widen
from pipeline.models.registry import describe_config
from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.executor import ModelExecutor
from pipeline.serving.engine.request import Sampling
from pipeline.serving.engine.scheduler import Decode, DecodeRow, Limits, Prefill
from pipeline.serving.engine.step_arguments import prefill_arguments
from pipeline.serving.engine.token_rules import TokenRules

CONTEXT, CHUNK, SLOTS = 32, 8, 3
LIMITS = Limits(slots=SLOTS, context=CONTEXT, chunk_tokens=CHUNK, decode_steps=4)
BUCKETS = Buckets(
    decode_batches=(SLOTS,), decode_attention=(CONTEXT,), chunks=(CHUNK,), prefill_attention=(CONTEXT,), copies=(CHUNK,)
)
SIZES = {
    "vocab_size": 104,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": CONTEXT,
}
COPY = ("copy", 1, CHUNK)
PREFILL, DECODE = ("prefill", CHUNK, CONTEXT), ("decode", SLOTS, CONTEXT)
CASES = {
    "llama": ({**SIZES, "num_hidden_layers": 2}, 2, None),
    "llama with fewer key-value heads than devices": (SIZES, 4, (PREFILL, DECODE)),
    "mixtral": ({**SIZES, "num_local_experts": 5}, 4, (PREFILL, DECODE)),
    "qwen3": ({**SIZES, "vocab_size": 101}, 2, (PREFILL,)),  # norms of each head, a vocabulary that does not divide
    "olmo2": ({**SIZES, "num_attention_heads": 4, "head_dim": 10}, 4, (PREFILL,)),  # norms over all heads
    "gemma2": ({**SIZES, "tie_word_embeddings": True}, 2, (PREFILL,)),
}
PROMPTS = (tuple(range(3, 17)), (90, 2, 44, 7, 61))
EXCHANGE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
GREEDY = Sampling(max_tokens=16, temperature=0.0)


def decoder(model_type, config):
    """Random leaves, norms and biases too: zero biases and unit scales would hide where they go."""
    rng = np.random.default_rng(2)
    description = describe_config({"model_type": model_type, **config})
    leaves = {
        path: (rng.normal(size=leaf.shape) * 0.3 + path.endswith("scale")).astype(np.float32)
        for path, leaf in abstract_leaves(description).items()
    }
    return build_model(description, leaves, dtype="float32", source="test")


def complete(executor):
    """Greedy tokens of both prompts, decoded together in slots 2 and 0, and the logits of every prompt's chunks."""
    rules = [TokenRules(GREEDY, prompt=prompt) for prompt in PROMPTS]
    tokens, logits = [], []
    for slot, prompt in zip((2, 0), PROMPTS, strict=True):
        for start in range(0, len(prompt), CHUNK):
            step = Prefill(
                request_id=str(slot),
                slot=slot,
                tokens=prompt[start : start + CHUNK],
                start=start,
                is_last=False,
                padded_to=CHUNK,
                attention_length=CONTEXT,
            )
            logits.append(np.asarray(executor.run(PREFILL, *prefill_arguments(step))[0]))
        tokens.append([*prompt, int(logits[-1].argmax())])
    for _ in range(2 if DECODE in executor._table else 0):
        rows = tuple(
            DecodeRow(request_id=str(slot), slot=slot, token=row[-1], position=len(row) - 1, budget=4)
            for slot, row in zip((2, 0), tokens, strict=True)
        )
        step = Decode(rows=rows, steps=4, padded_to=SLOTS, attention_length=CONTEXT)
        for row, chosen in zip(tokens, executor.decode(step, rules=rules), strict=True):
            row += chosen.tokens
    return tokens, np.concatenate(logits)


def executor_on(mesh, model, keys):
    made = ModelExecutor(nnx.clone(model), limits=LIMITS, buckets=BUCKETS, mesh=mesh, dtype="float32")
    if keys is not None:
        made._keys = lambda: iter(keys)  # the choice of a token alone costs two compiles
    made.warm_up()
    return made


def shapes(executor):
    """Of each parameter and of the cache: the largest part that one device holds, as a share of the whole."""
    leaves = dict(zip(executor._parameters._names, executor._parameters.arrays, strict=True))
    leaves |= {"cache.keys": executor._cache[0][0], "cache.values": executor._cache[0][1]}
    return {
        name: max(shard.data.size for shard in leaf.addressable_shards) / leaf.size for name, leaf in leaves.items()
    }


def exchanges(executor, key):
    return EXCHANGE.findall(executor._table[key].as_text())


def copied(executor):
    """What a copied prefix leaves in the other slot, and what the devices exchange for it."""
    executor.run(COPY, np.asarray(2, np.int32), np.asarray(1, np.int32))
    keys = np.asarray(executor._cache[-1][0])
    is_same = bool(np.array_equal(keys[1, :, :CHUNK], keys[2, :, :CHUNK]) and np.abs(keys[1, :, :CHUNK]).min() > 0)
    return {"is_same": is_same, "exchanges": exchanges(executor, COPY)}


def compiles_of(work):
    found = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    result = work()
    jax.monitoring.unregister_event_duration_listener(listen)
    return result, len(found)


def trial(name):
    config, tensor, keys = CASES[name]
    model = decoder(name.split()[0], config)
    many = executor_on(ServingMesh.of(*jax.devices()[:tensor]), model, keys)
    one = executor_on(ServingMesh.of(jax.devices()[0]), model, keys or (PREFILL, DECODE))
    (tokens, logits), num_compiles = compiles_of(lambda: complete(many))
    wanted_tokens, wanted_logits = complete(one)
    before = [part for pair in many._cache for part in pair]
    complete(many)
    return {
        "tensor": tensor,
        "tokens": tokens,
        "wanted_tokens": wanted_tokens,
        "largest_logit": float(np.abs(wanted_logits).max()),
        "difference": float(np.abs(logits - wanted_logits).max()),
        "num_compiles": num_compiles,
        "is_donated": all(part.is_deleted() for part in before),
        "shares": shapes(many),
        "num_layers": len(model.layers),
        "copy": copied(many) if COPY in many._table else None,
        "prefill_exchanges": exchanges(many, PREFILL),
        "decode_exchanges": exchanges(many, DECODE) if DECODE in many._table else [],
    }


def loaded(directory):
    """A model directory on four devices: wrong leaves, and the share of each that one device was sent."""
    config = {"model_type": "olmo2", **SIZES}  # norms of keys over all heads, of which there are fewer than devices
    (directory / "config.json").write_text(json.dumps(config))
    model = decoder("olmo2", SIZES)
    save_parameters(directory / "params", model_leaves(model))
    mesh = ServingMesh.of(*jax.devices()[:4])
    found = model_leaves(load_model(directory, dtype=None, layout=mesh.layout(describe_config(config))))
    wanted = model_leaves(widen(model, tensor=4))
    wrong = [path for path in wanted if not np.array_equal(np.asarray(found[path]), np.asarray(wanted[path]))]
    sent = {path: max(part.data.size for part in leaf.addressable_shards) / leaf.size for path, leaf in found.items()}
    return {"wrong": wrong, "shares": sent, "shapes": {path: leaf.shape for path, leaf in found.items()}}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        report = {"loaded": loaded(Path(directory)), "trials": {name: trial(name) for name in (sys.argv[1:] or CASES)}}
    print(json.dumps(report))
