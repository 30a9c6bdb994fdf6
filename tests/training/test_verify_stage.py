"""What `pipeline verify-resume` refuses before a rank starts, and what it hands to the experiment."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaForCausalLM

from pipeline.diagnostics import verify_stage
from pipeline.errors import ParameterError
from pipeline.stages.parameters import TrainFsdpParameters
from pipeline.stages.protocol import Resources
from pipeline.training.config import Lora

SEQUENCE_LENGTH = 16


@pytest.fixture
def verify(token_rows: Path, tmp_path: Path, make_job, monkeypatch):
    (tmp_path / "tiny.json").write_text(json.dumps(make_job().config.model))
    handed = {}

    class Report:
        def to_json(self):
            return {}

    def experiment(given, **options):
        handed.update(options, config=given.config, open_initial=given.open_initial)
        return Report()

    monkeypatch.setattr(verify_stage, "verify_resume", experiment)

    def run(*, workers: int = 2, other_workers: int | None = None, **fields):
        given = {
            "dataset": "${stages.data.outputs.dataset}",
            "model": "tiny.json",
            "steps": 500,
            "global_batch_tokens": 8 * SEQUENCE_LENGTH,
            "micro_batch_sequences": 2,
        } | fields
        verify_stage.verify_stage(
            TrainFsdpParameters(**given),
            resources=Resources(workers=workers),
            inputs={"dataset": (token_rows, "digest")},
            project_root=tmp_path,
            steps=10,
            checkpoint_every=3,
            kill_at=(),
            every=False,
            other_workers=other_workers,
            notice=lambda text: None,
        )
        return handed

    return run


def test_the_stage_is_run_as_it_is_but_for_its_length(verify) -> None:
    handed = verify(learning_rate=0.5, schedule="wsd", decay_steps=100, warmup_steps=200)
    config = handed["config"]
    assert (config.steps, config.checkpoint_every_steps, config.validate_every_steps, config.log_every_steps) == (
        *(10, 3, 10),
        1,
    )
    assert (config.learning_rate, config.schedule, config.decay_steps, config.warmup_steps) == (0.5, "wsd", None, 10)
    assert (handed["world_size"], handed["other_world_size"], handed["kills"]) == (2, 1, (2, 5, 7))
    assert verify(other_workers=0)["other_world_size"] is None
    assert verify(workers=1)["other_world_size"] == 2


def test_ranks_that_cannot_train_it_are_refused_before_any_starts(verify) -> None:
    with pytest.raises(ParameterError, match="global_batch_tokens 128 is no multiple"):
        verify(other_workers=3)
    with pytest.raises(ParameterError, match="2 does not divide 1 workers"):
        verify(parallel="hsdp", shard_group=2)


def test_weights_that_the_stage_starts_from_go_along(verify, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**json.loads((tmp_path / "tiny.json").read_text()))
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    handed = verify(model=None, initial="base", lora={"rank": 2})
    assert handed["config"].initial.startswith("sha256:")
    assert handed["config"].lora == Lora(rank=2)
    assert "model.norm.weight" in handed["open_initial"]().shapes
