"""The same model in every format becomes the same leaves."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

from converters.conversion import convert
from converters.gguf_families import gguf_family
from converters.operations import InterleaveRope
from converters.rules import match, render
from pipeline.models.checkpoint import PARAMETERS_DIRECTORY, read_parameters

State = dict[str, torch.Tensor]


def safetensors(directory: Path, state: State) -> Path:
    save_file(state, directory / "model.safetensors")
    return directory


def one_file(directory: Path, state: State) -> Path:
    return safetensors(directory, state) / "model.safetensors"


def ranks(directory: Path, state: State) -> Path:
    """Two ranks, each with half of the rows; an odd row goes to the first."""
    for rank in range(2):
        rows = {name: (len(value) + 1) // 2 for name, value in state.items()}
        part = {name: value[rows[name] :] if rank else value[: rows[name]] for name, value in state.items()}
        places = {name: {"saved_offsets": [rank * rows[name], *[0] * (part[name].ndim - 1)]} for name in part}
        contiguous = {name: value.clone().contiguous() for name, value in part.items()}
        path = directory / f"shard-{rank}-model.safetensors"
        save_file(contiguous, path, metadata={"DCP_SHARDING_INFO": json.dumps(places)})
    return directory


def torch_file(directory: Path, state: State) -> Path:
    wrapped = {f"module._orig_mod.{name}": value for name, value in state.items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, directory / "model.pt")
    return directory


def gguf(directory: Path, state: State) -> Path:
    """As llama.cpp writes it, with 32-bit floats."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").unlink()
    names = gguf_family({"general.architecture": "llama"}).names
    writer = GGUFWriter(directory / "model.gguf", "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for name, value in state.items():
        stem, _, suffix = name.rpartition(".")
        ours, captures = next((o, c) for o, theirs in names.items() if (c := match(theirs, stem)) is not None)
        array = value.numpy()
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        if (kind := ours.rpartition(".")[2]) in heads:
            (array,) = InterleaveRope(heads[kind]).apply([array])
        writer.add_tensor(f"{render(ours, captures)}.{suffix}", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory


FORMATS: tuple[Callable[[Path, State], Path], ...] = (one_file, ranks, torch_file, gguf)


@pytest.mark.parametrize("write", FORMATS)
def test_leaves_are_those_of_the_safetensors(llama, tmp_path, write):
    model = llama(tie_word_embeddings=False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    leaves = []
    for number, form in enumerate((safetensors, write)):
        directory = tmp_path / f"source-{number}"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(model.config.to_dict()))
        convert(form(directory, state), to=tmp_path / f"flax-{number}")
        leaves.append(read_parameters(tmp_path / f"flax-{number}" / PARAMETERS_DIRECTORY))
    assert leaves[0].keys() == leaves[1].keys()
    assert all((leaf == leaves[1][path]).all() for path, leaf in leaves[0].items())


def test_float8_with_scales_becomes_what_it_stands_for(llama, tmp_path):
    model = llama(tie_word_embeddings=True)
    state, numbers = {}, {}
    for name, value in model.state_dict().items():
        if name.endswith("proj.weight"):
            stored, scale = (value / 0.03).to(torch.float8_e4m3fn), torch.full((1, 1), 0.03)
            state |= {name: stored, f"{name}_scale_inv": scale}
            numbers[name] = stored.float() * scale
        elif name != "lm_head.weight":
            state[name] = numbers[name] = value
    forms = {"float8": state, "plain": numbers}
    for form, tensors in forms.items():
        directory = tmp_path / form
        directory.mkdir()
        quantization = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        config = model.config.to_dict() | (quantization if form == "float8" else {})
        (directory / "config.json").write_text(json.dumps(config))
        convert(safetensors(directory, tensors), to=tmp_path / f"flax-{form}")
    ours, plain = (read_parameters(tmp_path / f"flax-{form}" / PARAMETERS_DIRECTORY) for form in forms)
    assert all((leaf == plain[path]).all() for path, leaf in ours.items())
    assert "quantization_config" not in json.loads((tmp_path / "flax-float8" / "config.json").read_text())


def test_config_of_a_gguf_file_is_its_own_whatever_lies_beside_it(llama, tmp_path):
    model = llama(tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    gguf(tmp_path, dict(model.state_dict()))
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict() | {"rms_norm_eps": 0.5}))
    convert(tmp_path / "model.gguf", to=tmp_path / "flax")
    written = json.loads((tmp_path / "flax" / "config.json").read_text())
    assert written["rms_norm_eps"] == pytest.approx(model.config.rms_norm_eps)
