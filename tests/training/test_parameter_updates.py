"""Optimizers, groups, freezing, the average and the loss scale, on one rank."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
import trained_modules
from conftest import TINY_MODEL
from rank_functions import StoppedError, StoppingRows, stored_tensors, train_recorded

from converters.readers import open_source
from pipeline.errors import ParameterError
from pipeline.training.config import Ema, ParameterGroup, TrainConfig
from pipeline.training.loop import train
from pipeline.training.reporter import SilentReporter
from pipeline.training.session import open_session
from pipeline.training.step import take_step
from pipeline.training.tasks.model import blocks_of, build_model, model_config
from pipeline.training.tasks.module_task import module_blocks
from pipeline.training.updates.groups import hidden_matrices, rules_of
from pipeline.training.updates.loss_scale import LossScale
from pipeline.training.updates.mixed_optimizer import MixedOptimizer
from pipeline.training.updates.muon import WholeMatrixMuon
from pipeline.training.updates.optimizer import set_learning_rate
from pipeline.training.updates.refusals import check_updates
from pipeline.training.worker import joined

MUON_TOLERANCE = 1e-6
"""Absolute, of parameters after 3 steps of 1e-2; the same operations in the same order. Measured: 0."""
AVERAGE_TOLERANCE = 1e-6
"""Absolute, of averages near 1; measured: 1.2e-7, a bit of float32."""
HALF_TOLERANCE = 2e-2
"""Relative, of gradient norms; float16 has 11 bits. Measured: 6e-4 in the first step, 3e-3 in the third."""


def config(**fields) -> TrainConfig:
    return TrainConfig(model=TINY_MODEL, steps=10, micro_batch_sequences=2, learning_rate=1e-2, **fields)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build_model(model_config(TINY_MODEL), seed=0)


def rules_by_name(model: torch.nn.Module, run: TrainConfig) -> dict[str, tuple[str, float, float]]:
    names = {id(item): name for name, item in model.named_parameters()}
    rules = rules_of(model, run, matrices=hidden_matrices(model, blocks_of(model)))
    return {names[id(item)]: dataclasses.astuple(rule) for rule, items in rules.items() for item in items}


def test_muon_gets_the_matrices_of_blocks_and_adamw_the_rest(model) -> None:
    found = rules_by_name(model, config(optimizer="muon"))
    assert {name for name, rule in found.items() if rule[0] == "muon"} == {
        f"model.layers.{layer}.{name}.weight"
        for layer in range(2)
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    }
    assert found["model.embed_tokens.weight"] == ("adamw", 1.0, 0.1)
    assert found["model.norm.weight"] == ("adamw", 1.0, 0.0)
    network = trained_modules.Network()
    assert hidden_matrices(network, module_blocks(network)) == frozenset()  # kernels have four dims
    line = trained_modules.Line()
    assert hidden_matrices(line, module_blocks(line)) == {"layers.0.weight", "layers.2.weight"}


def test_the_first_group_that_matches_any_name_of_a_parameter_counts(model) -> None:
    groups = (
        ParameterGroup(match=r"lm_head", learning_rate_ratio=0.5),  # tied to the embedding
        ParameterGroup(match=r"embed|layers\.0\.mlp", weight_decay=0.25),
        ParameterGroup(match=r"mlp\.up_proj", optimizer="muon"),
    )
    found = rules_by_name(model, config(parameter_groups=groups))
    assert found["model.embed_tokens.weight"] == ("adamw", 0.5, 0.1)
    assert found["model.layers.0.mlp.up_proj.weight"] == ("adamw", 1.0, 0.25)
    assert found["model.layers.1.mlp.up_proj.weight"] == ("muon", 1.0, 0.1)
    assert found["model.layers.1.mlp.down_proj.weight"] == ("adamw", 1.0, 0.1)


def test_patterns_that_mean_nothing_are_refused_together_with_names_near_them(model) -> None:
    groups = (
        ParameterGroup(match="embedding"),
        ParameterGroup(match="mlp"),
        ParameterGroup(match="up_proj"),
        ParameterGroup(match="norm", optimizer="muon"),
    )
    with pytest.raises(ParameterError) as caught:
        check_updates(model, blocks_of(model), config(parameter_groups=groups, freeze=("atention",)))
    message = caught.value.message
    assert "freeze: 'atention' matches no parameter; near it (N is a number): model.layers.N.post_attention" in message
    assert "'embedding' matches no parameter; near it (N is a number): model.embed_tokens.weight" in message
    assert "all that 'up_proj' matches is frozen or in an earlier group" in message
    assert "'norm' with optimizer: muon has no matrices: model.layers.0.input_layernorm.weight" in message
    with pytest.raises(ParameterError, match=r"freeze: '\.' leaves nothing to train"):
        check_updates(model, blocks_of(model), config(freeze=(".",)))
    network = trained_modules.Network()
    with pytest.raises(ParameterError, match="no matrix inside a block"):
        check_updates(network, module_blocks(network), config(optimizer="muon"))
    with pytest.raises(ParameterError, match="compile: true with activation_checkpointing: selective"):
        check_updates(model, blocks_of(model), config(compile=True, activation_checkpointing="selective"))


def test_muon_is_that_of_torch_on_whole_matrices() -> None:
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.ones(5, 7)), torch.nn.Parameter(torch.ones(9, 4))] for _ in range(2))
    own = WholeMatrixMuon([{"params": ours, "weight_decay": 0.1}], lr=1e-2)
    torchs = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for left, right in zip(ours, theirs, strict=True):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        own.step()
        torchs.step()
    for left, right in zip(ours, theirs, strict=True):
        assert not torch.equal(left, torch.ones_like(left))
        assert (left - right).abs().max() <= MUON_TOLERANCE


def losses(make_job, one_rank, place: Path, **fields) -> tuple[list[float], dict[str, torch.Tensor], Path]:
    result, record = train_recorded(one_rank, make_job(workspace=place, **fields))
    return list(record.series("loss").values()), stored_tensors(place, result.commit), place / result.commit.key.prefix


def test_frozen_parameters_stay_and_are_stored_without_state(make_job, one_rank, tmp_path: Path) -> None:
    _, stored, _ = losses(make_job, one_rank, tmp_path / "a", freeze=("embed_tokens", r"layers\.0\."))
    start = dict(build_model(model_config(TINY_MODEL), seed=0).named_parameters())
    with_state = {name.split("/")[2] for name in stored if name.startswith("optimizer/state/")}
    for name, value in start.items():
        is_frozen = "embed_tokens" in name or "layers.0." in name
        assert torch.equal(stored[f"model/{name}"], value) == is_frozen, name
        assert (name in with_state) != is_frozen, name


def test_a_rate_of_zero_holds_a_group_and_ratios_follow_the_schedule(make_job, one_rank, tmp_path: Path) -> None:
    groups = (ParameterGroup(match="mlp", learning_rate_ratio=0.0), ParameterGroup(match="norm", learning_rate_ratio=3))
    job = make_job(parameter_groups=groups)
    with joined(one_rank):
        session = open_session(one_rank, job)
        before = {name: item.full_tensor().clone() for name, item in session.model.named_parameters()}
        for step in range(2):
            take_step(session, step)
        set_learning_rate(session.optimizer, 0.5)
        assert {group["lr"] for group in session.optimizer.param_groups} == {0.0, 0.5, 1.5}
        for name, item in session.model.named_parameters():
            assert torch.equal(item.full_tensor(), before[name]) == ("mlp" in name), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_on_the_host_changes_no_bit(make_job, one_rank, tmp_path: Path, monkeypatch, optimizer: str) -> None:
    monkeypatch.setattr("pipeline.training.updates.mixed_optimizer._CHUNK_ELEMENTS", 3000)  # several chunks a group
    plain, stored, _ = losses(make_job, one_rank, tmp_path / "a", steps=4, optimizer=optimizer)
    for offload in ("optimizer", "all"):
        moved, held, _ = losses(make_job, one_rank, tmp_path / offload, steps=4, optimizer=optimizer, offload=offload)
        assert moved == plain
        names = [name for name in stored if name.startswith(("model/", "optimizer/state/"))]
        assert all(torch.equal(stored[name], held[name]) for name in names)


def test_loaded_state_that_is_kept_on_the_host_is_never_brought_to_the_device() -> None:
    weight = torch.nn.Parameter(torch.empty(3, 2, device="meta"))
    group = {"params": [weight], "algorithm": "adamw", "weight_decay": 0.0, "learning_rate_ratio": 1.0}
    adamw = {"lr": 1e-2, "betas": (0.9, 0.99), "fused": False}
    optimizer = MixedOptimizer([group], adamw=adamw, state_on_host=True)
    moment = torch.arange(6.0).reshape(3, 2)
    stored = optimizer.state_dict() | {"state": {0: {"step": torch.tensor(4.0), "exp_avg": moment}}}
    stored["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(stored)
    assert torch.equal(optimizer.state[weight]["exp_avg"], moment)
    assert {value.device.type for value in optimizer.state[weight].values()} == {"cpu"}
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_average_is_the_formula_and_is_what_the_checkpoint_hands_on(make_job, one_rank, tmp_path: Path) -> None:
    decay = 0.4
    with joined(one_rank):
        session = open_session(one_rank, make_job(ema=Ema(decay=decay), workspace=tmp_path / "by-hand"))
        expected = {name: item.full_tensor().clone() for name, item in session.model.named_parameters()}
        for step in range(6):
            take_step(session, step)
            kept = min(decay, (2 + step) / (11 + step))
            for name, item in session.model.named_parameters():
                expected[name] = expected[name] * kept + item.full_tensor() * (1 - kept)
    result, record = train_recorded(one_rank, make_job(ema=Ema(decay=decay)))
    stored = stored_tensors(tmp_path / "workspace", result.commit)
    source = open_source(tmp_path / "workspace" / result.commit.key.prefix)
    assert set(source.headers) == set(expected)
    for name, value in expected.items():
        average = stored[f"extras/ema/{name}"]
        assert torch.allclose(average, value, rtol=0, atol=AVERAGE_TOLERANCE), name
        assert not torch.equal(average, stored[f"model/{name}"])
        assert torch.equal(torch.from_numpy(source.read(name)), average), name

    # Both losses are reported; that of the average is the loss of a model that has it, whatever was gathered before.
    both = [record.series(name) for name in ("validation_loss", "ema_validation_loss")]
    assert sorted(both[0]) == sorted(both[1]) == [0, 3, 6]
    assert both[0][0] == both[1][0]
    assert both[0][6] != both[1][6]
    assert result.state.validation["ema_validation_loss"] == both[1][6]
    with joined(one_rank):
        session = open_session(one_rank, make_job(workspace=tmp_path / "other"))
        with torch.no_grad():
            for name, item in session.model.named_parameters():
                item.to_local().copy_(stored[f"extras/ema/{name}"])
        plan = session.plan
        found = session.task.validate(session.model, one_rank, max_rows=7, micro_batch_rows=plan.rows_per_micro_batch)
    assert found["validation_loss"] == both[1][6]


@pytest.mark.parametrize(
    "fields",
    [
        {"ema": Ema(decay=0.9), "optimizer": "muon", "freeze": (r"layers\.0\.mlp",), "offload": "optimizer"},
        {"precision": "float16", "parameter_groups": (ParameterGroup(match="norm", weight_decay=0.2),)},
    ],
    ids=["muon-average-frozen-offload", "float16-groups"],
)
def test_whatever_is_updated_resumes_bit_for_bit(make_job, one_rank, token_rows: Path, tmp_path: Path, fields) -> None:
    straight, record = train_recorded(one_rank, make_job(workspace=tmp_path / "straight", **fields))
    stopping = functools.partial(StoppingRows, token_rows, stop_at=4)
    with pytest.raises(StoppedError):
        train(one_rank, make_job(open_dataset=stopping, **fields), reporter=SilentReporter())
    resumed, again = train_recorded(one_rank, make_job(**fields))
    assert resumed.resumed_from_step == 3
    for name in ("loss", "gradient_norm", "validation_loss", "ema_validation_loss", "loss_scale"):
        assert again.series(name) == {step: value for step, value in record.series(name).items() if step > 3}
    ours = stored_tensors(tmp_path / "workspace", resumed.commit)
    theirs = stored_tensors(tmp_path / "straight", straight.commit)
    assert ours.keys() == theirs.keys()
    different = [
        name
        for name, value in ours.items()
        if not (torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name])
    ]
    assert different == []


def test_a_loss_scale_halves_where_gradients_overflow_and_grows_after_steps_that_do_not() -> None:
    scale = LossScale()
    assert scale.adapt(is_finite=False)
    assert scale.value == 2.0**15
    for _ in range(2000):
        assert not scale.adapt(is_finite=True)
    assert scale.value == 2.0**16
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    assert other.state_dict() == scale.state_dict()
    for _ in range(16):
        assert scale.adapt(is_finite=False)
    assert scale.value == 1.0
    assert not scale.adapt(is_finite=False)  # no scale is to blame any more


def test_float16_trains_as_float32_does_and_skips_what_overflows(make_job, one_rank, tmp_path: Path) -> None:
    with joined(one_rank):
        whole = open_session(one_rank, make_job(workspace=tmp_path / "a"))
        half = open_session(one_rank, make_job(workspace=tmp_path / "b", precision="float16"))
        for step in range(3):
            expected = take_step(whole, step).gradient_norm
            assert take_step(half, step).gradient_norm == pytest.approx(expected, rel=HALF_TOLERANCE)
        before = [item.full_tensor().clone() for item in half.parameters]
        half.loss_scale.value = 2.0**24
        outcome = take_step(half, 3)
        assert outcome.gradient_norm == float("inf") or outcome.gradient_norm != outcome.gradient_norm
        assert outcome.is_finite  # for the policy: the scale is to blame
        assert half.loss_scale.value == 2.0**23
        assert all(torch.equal(item.full_tensor(), value) for item, value in zip(half.parameters, before, strict=True))
