"""The flow that the README starts with."""

import json
import subprocess
import sys
from pathlib import Path

from pipeline.plan.graph import levels, open_flow

ROOT = Path(__file__).parents[2]
FLOW = ROOT / "flows" / "llm.yaml"
HEAVY = ("torch", "jax", "ray", "mlflow", "transformers", "flax", "fsspec", "numpy")
VALIDATE_SECONDS = 2.0
"""Import and validation in a fresh interpreter take 0.25 s on an idle core; the margin is for a busy one."""


def test_the_stages_and_their_order():
    flow = open_flow(FLOW)
    assert levels(flow.stages) == (("data",), ("train",), ("flax",), ("parity", "quality"), ("register",), ("serve",))
    assert [stage.kind.name for stage in flow.stages] == [
        "data.text",
        "train.fsdp",
        "convert.flax",
        "evaluate.parity",
        "evaluate.loss",
        "register.model",
        "deploy.serve",
    ]


def test_the_gates_that_make_it_a_proof():
    gates = {stage.name: {gate.metric: gate for gate in stage.gates} for stage in open_flow(FLOW).stages}
    assert gates["parity"]["max_abs_logit_difference"].limit <= 1e-3
    assert gates["parity"]["greedy_match"].limit == 1.0
    assert gates["quality"]["validation_loss"].limit < 8.3


def test_serving_starts_behind_the_gates():
    stages = {stage.name: stage for stage in open_flow(FLOW).stages}
    assert "register" in stages["serve"].needs
    assert {"parity", "quality"} <= set(stages["register"].needs)


def test_parameters_can_be_overridden():
    flow = open_flow(FLOW, overrides=["steps=5", "learning_rate=1e-5"])
    train = next(stage for stage in flow.stages if stage.name == "train")
    assert (train.parameters.steps, train.parameters.learning_rate) == (5, 1e-5)


def test_the_vocabulary_fits_the_model():
    flow = open_flow(FLOW)
    model = json.loads((ROOT / "configs" / "models" / "llama-8m.json").read_text())
    assert flow.spec.params["vocabulary_size"] <= model["vocab_size"]


def test_validating_is_quick_and_loads_no_framework():
    code = (
        "import sys, time; start = time.perf_counter(); from pathlib import Path; "
        "from pipeline.plan.graph import open_flow; import pipeline.plan.planner, pipeline.plan.schema; "
        f"open_flow(Path({str(FLOW)!r})); print(time.perf_counter() - start); "
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    seconds, loaded = done.stdout.split("\n")[:2]
    assert loaded == ""
    assert float(seconds) < VALIDATE_SECONDS
