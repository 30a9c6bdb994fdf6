"""Deployments of one flow on one GPU are sent into one process, each with its part of the memory."""

import json

from pipeline.cluster.isolation import ServingAsk, ServingPlan
from pipeline.stages.deploy_serve import _process, _settings
from pipeline.stages.parameters import DeployServeParameters
from pipeline.stages.protocol import InputArtifact, Resources, StageContext
from pipeline.stages.reference import OutputReference
from pipeline.stages.reporting import BufferedReporter

CONFIG = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def context_of(tmp_path, *, asks, num_devices=1):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = InputArtifact(
        stage="flax", output="model", path=tmp_path, fingerprint="f", digest="d" * 64, run_id="r", metrics={}
    )
    return StageContext(
        run_id="r",
        flow="f",
        stage="serve",
        attempt=1,
        fingerprint="f",
        parameters=DeployServeParameters(model=OutputReference(stage="flax", output="model"), name="chat"),
        inputs={"model": model},
        output_root=tmp_path / "out",
        workspace=str(tmp_path),
        project_root=tmp_path,
        resources=Resources(cpus=1, gpus=0.25),
        reporter=BufferedReporter(),
        deadline=None,
        environment={
            "state_directory": str(tmp_path / "state"),
            "serving_plan": ServingPlan(asks=asks, num_devices=num_devices).to_text(),
        },
    )


def test_the_process_has_the_sum_and_the_model_its_part(tmp_path):
    asks = (ServingAsk(name="chat", share=0.25), ServingAsk(name="embed", share=0.5))
    context = context_of(tmp_path, asks=asks)
    settings = _settings(context, context.input("model"))
    application, process = _process(context, settings)
    assert (application, process.isolation, process.gpus, process.replicas) == ("shared-gpu", "shared", 0.75, 1)
    assert process.environment["PIPELINE_GPU_SHARE"] == "0.75"
    assert process.environment["PIPELINE_STATE_DIRECTORY"] == str(tmp_path / "state")
    assert round(settings.memory_part, 6) == round(1 / 3, 6)
    assert (settings.slots, settings.context, settings.min_tokens_per_second) == (None, None, 0.5)
    assert "one process with embed" in str(context.reporter.drain())


def test_on_several_gpus_each_has_a_process_and_all_of_its_memory(tmp_path):
    asks = (ServingAsk(name="chat", share=0.25), ServingAsk(name="embed", share=0.5))
    context = context_of(tmp_path, asks=asks, num_devices=2)
    settings = _settings(context, context.input("model"))
    application, process = _process(context, settings)
    assert (application, process.isolation, process.gpus, settings.memory_part) == ("chat", "process", 0.25, 1.0)
