"""Tiny random Llama models that break every symmetry, and their checkpoints."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM

# Heads differ in number from key-value heads, the head size is no power of two, nothing is square but q and o.
TINY = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def tiny_llama(**overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start at one and biases at zero, which would hide a swap
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            else:
                parameter.mul_(8.0)
    return model.eval()


def write_checkpoint(
    directory: Path, model: LlamaForCausalLM, *, state: Mapping[str, torch.Tensor] | None = None, **config: Any
) -> Path:
    directory.mkdir(parents=True)
    values = dict(model.state_dict() if state is None else state)
    optimizer = {"state": {name: {"exp_avg": torch.zeros_like(value)} for name, value in values.items()}}
    dcp.save({"model": values, "optimizer": optimizer}, checkpoint_id=directory / "dcp", no_dist=True)
    written = {**model.config.to_dict(), **config}
    (directory / "config.json").write_text(json.dumps(written))
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def llama() -> Callable[..., LlamaForCausalLM]:
    return tiny_llama


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    def make(model: LlamaForCausalLM, **given: Any) -> Path:
        return write_checkpoint(tmp_path / f"checkpoint-{len(list(tmp_path.iterdir()))}", model, **given)

    return make
