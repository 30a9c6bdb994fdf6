"""Training that starts from weights that exist: placed on any number of ranks, refused where they do not fit."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_MODEL
from rank_functions import Recorder, fine_tuned_on_ranks, stored_tensors, train_recorded
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaForCausalLM

from converters.starting_weights import open_weights
from pipeline.data.packed import PackedDataset
from pipeline.errors import CheckpointError, ParameterError
from pipeline.training.config import Lora
from pipeline.training.launch.spawn import spawn
from pipeline.training.loop import train
from pipeline.training.start.weights import check_weights, give_memory
from pipeline.training.tasks.empty_model import build_empty
from pipeline.training.tasks.loss import loss_sum, to_device
from pipeline.training.tasks.model import build_model, model_config
from pipeline.training.tasks.starting import check_start

FLOAT32_TOLERANCE = 2e-6
"""Relative; the order of float32 sums differs between cuts of a batch. Measured: up to 4e-8 after 6 steps."""
LARGE_MODEL = TINY_MODEL | {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8}
MEMORY_SLACK = 16 * 2**20
"""Bytes of a rank beyond its shards while 71 MB of weights are placed; measured: 6.2 and 6.4 MB."""


def save_base(directory: Path, model: dict = TINY_MODEL, *, seed: int = 3, shard_size: str = "30KB") -> Path:
    torch.manual_seed(seed)
    LlamaForCausalLM(AutoConfig.for_model(**model)).to(torch.bfloat16).save_pretrained(
        directory, max_shard_size=shard_size
    )
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 directory of transformers, in several files."""
    directory = save_base(tmp_path_factory.mktemp("base"))
    assert (directory / "model.safetensors.index.json").exists()
    return directory


@pytest.fixture
def fine_tune(make_job, base: Path, tmp_path: Path):
    """`fine_tune(workspace, place=..., **fields of TrainConfig)`."""

    def make(workspace: str = "workspace", *, place: Path = base, open_dataset=None, **fields):
        job = make_job(workspace=tmp_path / workspace, initial="digest", open_dataset=open_dataset, **fields)
        return replace(job, open_initial=functools.partial(open_weights, str(place)))

    return make


def test_training_starts_with_what_transformers_loads(fine_tune, one_rank, base: Path, token_rows: Path) -> None:
    dataset = PackedDataset.open(token_rows)
    result, _ = train_recorded(one_rank, fine_tune(validation_sequences=10_000))
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    inputs, targets = to_device(dataset.rows("validation", np.arange(dataset.num_rows("validation"))), one_rank)
    with torch.no_grad():
        expected = float(loss_sum(model, inputs, targets)) / targets.numel()
    assert result.state.initial_validation_loss == pytest.approx(expected, rel=FLOAT32_TOLERANCE)
    assert result.state.validation_loss < expected - 0.3


def test_a_tied_tensor_may_be_stored_under_its_other_name_alone(fine_tune, one_rank, base: Path, tmp_path) -> None:
    tensors = {name: torch.from_numpy(open_weights(str(base)).read(name)) for name in open_weights(str(base)).shapes}
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    expected, _ = train_recorded(one_rank, fine_tune("a", steps=1))
    found, _ = train_recorded(one_rank, fine_tune("b", place=tmp_path, steps=1))
    assert found.state.validation_loss == expected.state.validation_loss


def test_two_merges_of_one_base_have_two_sketches(base: Path, tmp_path: Path) -> None:
    """Adapters leave norms as they were; of each kind of tensor one is looked at."""
    tensors = {name: torch.from_numpy(open_weights(str(base)).read(name)) for name in open_weights(str(base)).shapes}
    sketches = set()
    for number, layer in enumerate(("q_proj", "q_proj", "mlp.down_proj")):
        merged = {name: value + number * 1e-3 * (layer in name) for name, value in tensors.items()}
        directory = tmp_path / str(number)
        directory.mkdir()
        save_file(merged, directory / "model.safetensors")
        (directory / "config.json").write_bytes((base / "config.json").read_bytes())
        sketches.add(open_weights(str(directory)).sketch())
    assert len(sketches) == 3


def test_memory_is_given_to_parameters_and_buffers_stay_where_they_are() -> None:
    model = build_empty(model_config(TINY_MODEL))
    before = dict(model.named_buffers())
    give_memory(model, device=torch.device("cpu"))
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert all(buffer is before[name] for name, buffer in model.named_buffers())


def test_a_committed_checkpoint_is_a_start_too_while_it_is_whole(fine_tune, one_rank, tmp_path: Path) -> None:
    first, _ = train_recorded(one_rank, fine_tune("first"))
    place = tmp_path / "first" / first.commit.key.prefix
    second, _ = train_recorded(one_rank, fine_tune("second", place=place, steps=3, checkpoint_every_steps=3))
    assert second.state.initial_validation_loss == pytest.approx(first.state.validation_loss, rel=FLOAT32_TOLERANCE)
    (place / "dcp" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="shard is missing"):
        train(one_rank, fine_tune("third", place=place), reporter=Recorder())


def test_resuming_takes_the_newest_commit_and_reads_no_starting_weights(fine_tune, one_rank, base: Path) -> None:
    done, _ = train_recorded(one_rank, fine_tune(steps=6))
    headers_only = replace(fine_tune(steps=6), open_initial=functools.partial(_Unreadable, str(base)))
    again, _ = train_recorded(one_rank, headers_only)
    assert again.resumed_from_step == 6
    assert again.state == done.state


class _Unreadable:
    """Weights whose headers alone can be read."""

    def __init__(self, place: str) -> None:
        opened = open_weights(place)
        self.origin, self.shapes = place, opened.shapes

    def read(self, name: str) -> np.ndarray:
        raise AssertionError(f"{name} was read")


def test_every_tensor_that_does_not_fit_is_named_at_once(base: Path) -> None:
    other = TINY_MODEL | {"num_hidden_layers": 3, "intermediate_size": 40}
    with pytest.raises(CheckpointError) as caught:
        check_weights(build_empty(model_config(other)), open_weights(str(base)))
    assert "9 the model has, and they lack: model.layers.2.self_attn.q_proj.weight" in caught.value.message
    assert "6 have another shape: model.layers.0.mlp.gate_proj.weight (48, 32), the model's is (40, 32)" in (
        caught.value.message
    )
    fewer = TINY_MODEL | {"num_hidden_layers": 1}
    with pytest.raises(CheckpointError, match=r"9 they have, and the model lacks: model\.layers\.1"):
        check_weights(build_empty(model_config(fewer)), open_weights(str(base)))


class _Described:
    """Weights of which only names and shapes are known."""

    def __init__(self, base: Path, **others: tuple[int, ...]) -> None:
        self.origin = "described"
        self.shapes = {**open_weights(str(base)).shapes, **{name.replace("__", "."): at for name, at in others.items()}}


def test_what_the_model_computes_or_ties_may_be_stored_too(base: Path) -> None:
    model = build_empty(model_config(TINY_MODEL))
    stored = _Described(base, model__layers__0__self_attn__rotary_emb__inv_freq=(4,), lm_head__weight=(320, 32))
    assert "lm_head.weight" not in check_weights(model, stored)
    assert check_weights(model, stored)["model.embed_tokens.weight"].stored_name == "model.embed_tokens.weight"
    del stored.shapes["model.embed_tokens.weight"]
    assert check_weights(model, stored)["model.embed_tokens.weight"].stored_name == "lm_head.weight"
    stored.shapes["lm_head.weight"] = (320, 31)
    with pytest.raises(CheckpointError, match=r"1 have another shape: lm_head\.weight \(320, 31\)"):
        check_weights(model, stored)


def test_an_empty_model_has_the_buffers_and_ties_of_a_real_one() -> None:
    config = model_config(TINY_MODEL)
    empty, real = build_empty(config), build_model(config, seed=0)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    theirs = dict(real.named_buffers())
    assert theirs
    assert all(torch.equal(buffer, theirs[name]) for name, buffer in empty.named_buffers())


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"lora": Lora(targets=("q_prj", "v_proj"))}, r"ends in 'q_prj' \(did you mean 'q_proj'\?\)"),
        (
            {"lora": Lora(targets=("lm_head",))},
            r"lm_head has the weight of the embedding \(tie_word_embeddings: true\)",
        ),
        ({"lora": Lora(), "freeze": ("embed",)}, "it excludes freeze"),
    ],
)
def test_adapters_that_cannot_be_are_refused_without_ranks(fine_tune, base: Path, fields, found: str) -> None:
    with pytest.raises(ParameterError, match=found):
        check_start(fine_tune(**fields).config, open_weights(str(base)))
    with pytest.raises(ParameterError, match="`initial` names none"):
        check_start(fine_tune(**fields).config, None)


def test_two_ranks_train_as_one_and_hold_their_shards_alone(
    fine_tune, one_rank, token_rows: Path, tmp_path: Path
) -> None:
    """Adapters with dropout, interrupted and resumed; all parameters; and the memory that placing takes: one spawn."""
    lora = {"lora": Lora(rank=3, alpha=12, dropout=0.1)}
    full = fine_tune("full")
    straight, resumed = fine_tune("straight", **lora), fine_tune("resumed", **lora)
    large = fine_tune("large", model=LARGE_MODEL, place=save_base(tmp_path / "big", LARGE_MODEL, shard_size="20MB"))
    ranks = spawn(
        fine_tuned_on_ranks, full, straight, resumed, str(token_rows), large, world_size=2, timeout_seconds=240
    )
    alone, _ = train_recorded(one_rank, fine_tune("alone"))
    assert ranks[0].full.state.validation_loss == pytest.approx(alone.state.validation_loss, rel=FLOAT32_TOLERANCE)
    for cut in ranks[0].cut:
        assert cut.state.initial_validation_loss == pytest.approx(
            alone.state.initial_validation_loss, rel=FLOAT32_TOLERANCE
        )

    assert ranks[0].resumed.resumed_from_step == 3
    ours = stored_tensors(tmp_path / "straight", ranks[0].straight.commit)
    theirs = stored_tensors(tmp_path / "resumed", ranks[0].resumed.commit)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name], name
    in_model = [name for name in ours if name.startswith("model/")]
    assert len(in_model) == 2 * 7 * 2  # A and B of seven layers in two blocks, and nothing of the base
    assert all(".lora_" in name for name in in_model)
    without_dropout = {"lora": replace(lora["lora"], dropout=0.0), "steps": 3}
    single, _ = train_recorded(one_rank, fine_tune("single", **without_dropout))
    assert ranks[0].without_dropout.state.validation_loss == pytest.approx(
        single.state.validation_loss, rel=FLOAT32_TOLERANCE
    )
    for rank in ranks:
        if rank.peak_bytes is None:
            continue  # a system that does not measure it
        assert rank.peak_bytes < rank.shard_bytes + MEMORY_SLACK < 2 * rank.shard_bytes
