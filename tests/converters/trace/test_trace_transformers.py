"""Tiny random transformers models, traced at one size, agree with torch at others."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from torch import nn
from tracing import relative_error

from converters.trace.examples import transformers_examples
from converters.trace.export import trace_module
from converters.trace.model import prepare
from pipeline.models.traced.description import TracedModel

MODEL_ERROR = 2e-6
"""Relative. Seen: 5e-7 (T5)."""
TEXT = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 8}


def llama() -> tuple[type, Any]:
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**TEXT, num_key_value_heads=2, head_dim=6)


def gpt2() -> tuple[type, Any]:
    config = transformers.GPT2Config(
        vocab_size=101, n_embd=48, n_layer=2, n_head=8, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel, config


def bert() -> tuple[type, Any]:
    return transformers.BertModel, transformers.BertConfig(**TEXT, max_position_embeddings=64)


def vit() -> tuple[type, Any]:
    config = transformers.ViTConfig(
        hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=8, image_size=28, patch_size=7
    )
    return transformers.ViTForImageClassification, config


def resnet() -> tuple[type, Any]:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic")
    return transformers.ResNetForImageClassification, config


def t5() -> tuple[type, Any]:
    config = transformers.T5Config(
        vocab_size=101, d_model=48, d_kv=6, d_ff=72, num_layers=1, num_heads=8, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration, config


def made(build: Callable[[], tuple[type, Any]]) -> nn.Module:
    torch.manual_seed(9)
    kind, config = build()
    prepare(config)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start at one and biases at zero, which would hide a swap
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    return model.eval()


def described(model: nn.Module) -> TracedModel:
    examples = transformers_examples(model, dtype=torch.float32)
    trace = trace_module(model, kwargs=examples.inputs, dynamic=examples.dynamic)
    return TracedModel(program=trace.program, constants=trace.constants, config={"model_type": "any"})


def as_tensors(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    return {name: value if value.is_floating_point() else value.long() for name, value in tensors.items()}


@pytest.mark.parametrize(
    "build",
    [gpt2, *(pytest.param(build, marks=pytest.mark.slow) for build in (llama, t5, bert, vit, resnet))],
    ids=lambda build: build.__name__,
)
def test_outputs_are_torchs_at_sizes_the_trace_never_saw(build: Callable[[], tuple[type, Any]]) -> None:
    model = made(build)
    traced = described(model)
    state = model.state_dict()
    module = traced.module({name: state[name].numpy() for name in traced.program.leaves})
    inputs = traced.example_inputs(seed=4)
    found = nnx.jit(traced.forward)(module, inputs)
    with torch.no_grad():
        wanted = model(**as_tensors(inputs))
    assert found.keys() <= wanted.keys()
    assert {"logits", "last_hidden_state"} & found.keys()
    for name, value in found.items():
        assert relative_error(wanted[name], value) < MODEL_ERROR, name


def test_a_language_model_is_open_in_batch_and_length_and_knows_its_vocabulary() -> None:
    program = described(made(gpt2)).program
    ids, mask = program.inputs["input_ids"], program.inputs["attention_mask"]
    assert ids.shape == mask.shape == ("batch", "sequence")
    assert (ids.high, mask.high) == (101, 2)
    assert program.leaves["transformer.wte.weight"].aliases == ("lm_head.weight",)
    assert [path for path, _ in program.taps] == ["transformer.h.0", "transformer.h.1"]


@pytest.mark.slow
def test_the_limit_of_learned_positions_is_recorded() -> None:
    program = described(made(bert)).program
    assert (program.dimensions["sequence"].low, program.dimensions["sequence"].high) == (1, 64)
    assert program.dimensions["batch"].high is None


@pytest.mark.slow
def test_padding_on_the_right_does_not_reach_what_stands_before_it() -> None:
    model = made(llama)
    traced = described(model)
    state = model.state_dict()
    module = traced.module({name: state[name].numpy() for name in traced.program.leaves})
    ids = np.random.default_rng(0).integers(0, 101, (2, 8)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[1, 5:] = 0
    forward = nnx.jit(traced.forward)
    whole = forward(module, {"input_ids": ids, "attention_mask": mask})["logits"]
    short = forward(module, {"input_ids": ids[1:, :5], "attention_mask": mask[1:, :5]})["logits"]
    assert np.allclose(whole[1, :5], short[0], atol=2e-5)
