"""What a `train.fsdp` of adapters hands on: a plain model that computes what base and adapter compute."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM

from converters.conversion import convert
from converters.parity import check_parity
from converters.readers import open_source
from converters.starting_weights import open_weights
from pipeline.artifacts.store import open_store
from pipeline.data.dataset import open_dataset
from pipeline.errors import CheckpointError
from pipeline.stages import data_text
from pipeline.stages.merged_export import export_merged
from pipeline.stages.parameters import DataTextParameters, TrainFsdpParameters
from pipeline.stages.starting_point import StartingPoint, inherit, starting_point
from pipeline.stages.train_fsdp import config_of
from pipeline.training.launch.spawn import free_port
from pipeline.training.loop import train
from pipeline.training.reporter import SilentReporter
from pipeline.training.session import TrainJob
from pipeline.training.start.weights import PlainTensor
from pipeline.training.tasks.starting import check_start
from pipeline.training.worker import WorkerContext

MERGE_TOLERANCE = 2e-6
"""Of logits that reach 0.62: one product where adapters are merged, two where they are not. Measured: 1.9e-7."""
TEMPLATE = "additional_chat_templates/tools.jinja"
MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


@pytest.fixture
def tuned(stage_context, tiny_dataset: Path, tmp_path: Path) -> tuple[Path, Path, Callable[..., int]]:
    """(base, output, export again) of adapters trained for a few steps on text in the base's tokens, without Ray."""
    base = tmp_path / "base"
    torch.manual_seed(5)
    LlamaForCausalLM(AutoConfig.for_model(**MODEL)).to(torch.bfloat16).save_pretrained(base)
    (base / "tokenizer.json").write_bytes((tiny_dataset / "tokenizer.json").read_bytes())
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / TEMPLATE).parent.mkdir()
    (base / TEMPLATE).write_text("{{ tools }}")
    text = DataTextParameters(source=str(Path(json.__file__).parent / "*.py"), tokenizer="base", sequence_length=32)
    data_text.run(replace(stage_context(text, {}), output_root=tmp_path / "data"))
    dataset = tmp_path / "data" / "dataset"
    parameters = TrainFsdpParameters(
        dataset="${stages.data.outputs.dataset}",
        initial="base",
        lora={"rank": 4, "alpha": 32, "targets": ["q_proj", "v_proj", "down_proj"]},
        steps=4,
        learning_rate=3e-2,
        warmup_steps=1,
        global_batch_tokens=256,
        micro_batch_sequences=8,
        validation_sequences=8,
    )
    context = stage_context(parameters, {"dataset": dataset})
    start = starting_point(parameters, committed=None, project_root=tmp_path)
    config = config_of(parameters, open_dataset(dataset), project_root=tmp_path, start=start)
    job = TrainJob(
        config=config,
        workspace=context.workspace,
        open_dataset=functools.partial(open_dataset, dataset),
        open_initial=functools.partial(open_weights, start.place),
    )
    worker = WorkerContext(
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        device_reason="a test",
        store_address=f"127.0.0.1:{free_port()}",
    )
    result = train(worker, job, reporter=SilentReporter())
    assert result.state.validation_loss < result.state.initial_validation_loss

    def export(start: StartingPoint, directory: Path, *, more=None, without: str = "") -> int:
        tensors = {**check_start(config, start.weights), **(more or {})}
        tensors.pop(without, None)
        store = open_store(context.workspace)
        return export_merged(store, result.commit, directory, start=start, lora=config.lora, tensors=tensors)

    output = context.output("checkpoint")
    assert export(start, output) == 3 * 2
    assert inherit(start, output) == ("generation_config.json", "chat_template.jinja", TEMPLATE)
    return base, output, export


def test_a_tied_tensor_under_its_other_name_and_counters_are_merged_too(tuned, tmp_path: Path) -> None:
    base, output, export = tuned
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    counter = "model.layers.0.self_attn.rotary_emb.inv_freq"  # a name that the check lets through
    tensors[counter] = torch.tensor([2**40, -1])
    other, merged = tmp_path / "other", tmp_path / "merged"
    for directory in (other, merged):
        directory.mkdir()
    save_file(tensors, other / "model.safetensors")
    (other / "config.json").write_bytes((base / "config.json").read_bytes())
    start = StartingPoint(place=str(other), digest="d", weights=open_weights(str(other)))
    export(start, merged, more={counter: PlainTensor(shape=(2,), stored_name=counter)})
    found, expected = load_file(merged / "model.safetensors"), load_file(output / "model.safetensors")
    assert found.pop(counter).tolist() == [2**40, -1]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_adapter_of_what_the_plain_model_lacks_is_refused(tuned, tmp_path: Path) -> None:
    base, _, export = tuned
    start = StartingPoint(place=str(base), digest="d", weights=open_weights(str(base)))
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(CheckpointError, match=rf"adapters change {name}, which the plain model does not have"):
        export(start, tmp_path, without=name)


def test_the_merged_model_computes_what_base_and_adapter_compute(tuned, tmp_path: Path) -> None:
    base, output, _ = tuned
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 300, (3, 16)))
    plain = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        before = plain(tokens).logits
        adapted = PeftModel.from_pretrained(plain, output / "adapter").eval()(tokens).logits
        merged = LlamaForCausalLM.from_pretrained(output)(tokens).logits
    assert (adapted - before).abs().max() > 1000 * MERGE_TOLERANCE
    assert (merged - adapted).abs().max() < MERGE_TOLERANCE

    described = json.loads((output / "adapter" / "adapter_config.json").read_text())
    assert described["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    config = json.loads((output / "config.json").read_text())
    assert config["dtype"] == "float32"
    headers = open_source(output).headers
    assert {header.dtype for header in headers.values()} == {"float32"}
    assert "lm_head.weight" not in headers  # tied: one stored tensor
    convert(output, to=tmp_path / "flax")
    assert check_parity(output, tmp_path / "flax", continued_tokens=4).passed
    assert (tmp_path / "flax" / "chat_template.jinja").exists()
