"""One predictor a framework: fixed shapes on the JAX side, the key-value cache on the torch side."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import LlamaConfig as TorchLlamaConfig
from transformers import LlamaForCausalLM

from pipeline.errors import ParameterError
from pipeline.evaluation.flax_predictor import FlaxPredictor, choose_device
from pipeline.evaluation.metrics import token_losses
from pipeline.evaluation.scoring import score
from pipeline.evaluation.torch_predictor import TorchPredictor
from pipeline.models.decoders.model import Decoder
from pipeline.models.decoders.readers import read_decoder
from pipeline.models.family import FamilyModel
from pipeline.models.registry import FAMILIES

SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
}
# One float32 product against another order of the same sums, logits of size 6; seen 1.5e-5.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def flax_model():
    return Decoder(read_decoder({"model_type": "llama", **SIZES, "initializer_range": 0.5}), rngs=nnx.Rngs(0))


def judged(model):
    description = FamilyModel(family=FAMILIES["llama"], parsed=model.config)
    return FlaxPredictor(model, description=description, device=jax.devices("cpu")[0], batch_sequences=3)


@pytest.fixture(scope="module")
def predictor(flax_model):
    return judged(flax_model)


@pytest.fixture(scope="module")
def expected_logits(flax_model):
    graph, state = nnx.split(flax_model)
    return np.asarray(jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))(state, tokens(5)))


@pytest.fixture(scope="module")
def torch_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(TorchLlamaConfig(**SIZES, initializer_range=0.5))


def tokens(rows, length=9):
    return np.random.default_rng(length).integers(0, 53, size=(8, length)).astype(np.int32)[:rows]


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_flax_logits_are_the_models_whatever_the_batch(predictor, expected_logits, rows):
    logits = predictor.logits(tokens(rows))
    assert logits.shape == (rows, 9, 53)
    assert logits.dtype == np.float32
    assert np.abs(logits - expected_logits[:rows]).max() < TOLERANCE


def test_flax_compiles_once_for_every_number_of_rows(flax_model):
    predictor = judged(flax_model)
    for rows in (1, 2, 3, 4, 7):
        predictor.logits(tokens(rows))
    assert predictor.num_compilations == 1
    for rows in (1, 4):
        predictor.token_losses(tokens(rows))
        predictor.continue_greedily(tokens(rows, 4), num_tokens=5)
    assert predictor.num_compilations == 3


def test_flax_losses_are_those_of_the_formula(predictor, expected_logits):
    rows = tokens(4)
    expected = token_losses(expected_logits[:4, :-1], rows[:, 1:])
    assert np.abs(predictor.token_losses(rows) - expected).max() < TOLERANCE


def test_flax_continues_greedily(predictor):
    prompts = tokens(4, 3)
    continued = predictor.continue_greedily(prompts, num_tokens=5)
    text = np.zeros((4, 9), np.int32)
    text[:, :3] = prompts
    for position in range(3, 8):
        text[:, position] = predictor.logits(text)[:, position - 1].argmax(-1)
    assert (continued == text[:, 3:8]).all()
    assert continued.dtype == np.int32


def test_torch_continues_greedily_past_the_end_of_text(torch_model):
    prompts = tokens(2, 3)
    text = torch.from_numpy(prompts).long()
    with torch.no_grad():
        for _ in range(6):
            text = torch.cat([text, torch_model(text).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    expected = text[:, 3:].numpy()
    torch_model.generation_config.eos_token_id = int(expected[0, 1])
    continued = TorchPredictor(torch_model).continue_greedily(prompts, num_tokens=6)
    assert (continued == expected).all()
    assert continued.dtype == np.int32


def test_torch_logits_are_float32_without_gradient(torch_model):
    logits = TorchPredictor(torch_model).logits(tokens(2))
    assert logits.dtype == np.float32
    assert logits.shape == (2, 9, 53)


def test_score_weighs_every_token_the_same(predictor):
    data = tokens(5)
    found = {
        size: score(predictor, read=lambda rows: data[rows], rows=np.arange(5), batch_sequences=size) for size in (2, 5)
    }
    assert found[2].totals.num_tokens == 5 * 8
    assert found[2].totals.loss == pytest.approx(found[5].totals.loss, abs=TOLERANCE)
    assert found[2].totals.loss == pytest.approx(float(np.mean(found[2].loss_by_row)))
    assert found[2].totals.loss == pytest.approx(float(np.mean(found[2].loss_by_position)))
    assert len(found[2].loss_by_row) == 5


def test_device_is_chosen_with_a_reason():
    device, reason = choose_device("auto")
    assert (device.platform == "cpu" and "no CUDA" in reason) or device.platform == "gpu"
    assert choose_device("cpu")[0].platform == "cpu"


@pytest.mark.skipif(any(device.platform == "gpu" for device in jax.devices()), reason="a GPU is here")
def test_cuda_that_is_not_there_is_refused():
    with pytest.raises(ParameterError, match="device: cuda was asked for, jax sees: cpu"):
        choose_device("cuda")
