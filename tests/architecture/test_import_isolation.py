"""What a fresh interpreter loads for the verbs that must be quick, and for each side of the house."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "jax", "jaxlib", "flax", "orbax", "ray", "mlflow", "transformers", "onnx", "tensorflow")

RUN_VERB = """
import json, sys
sys.argv = ["pipeline", *ARGUMENTS]
from pipeline.cli.main import main
try:
    main()
except SystemExit as end:
    code = end.code
print()
print(json.dumps({"code": code, "loaded": sorted(name for name in HEAVY if name in sys.modules)}))
"""


def loaded_by(script: str, **values: object) -> dict[str, object]:
    for name, value in values.items():
        script = script.replace(name, repr(value))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PROJECT, timeout=120, check=True
    )
    result: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["convert", "--help"],
        ["parity", "--help"],
        ["validate", "flows/llm.yaml"],
        ["schema"],
        ["plan", "flows/llm.yaml", "--store", "STORE"],
        ["runs", "--store", "STORE"],
        ["down", "--store", "STORE"],
    ],
    ids=" ".join,
)
def test_quick_verbs_load_no_framework(arguments: list[str], tmp_path: Path) -> None:
    arguments = [str(tmp_path / "store") if word == "STORE" else word for word in arguments]
    result = loaded_by(RUN_VERB, ARGUMENTS=arguments, HEAVY=HEAVY)
    assert result == {"code": 0, "loaded": []}


def test_a_wrong_conversion_is_refused_before_a_framework_is_loaded(tmp_path: Path) -> None:
    for words in (["absent", "--to", "x"], ["absent", "--to", "x", "--format", "onyx"], [str(tmp_path / "absent")]):
        assert loaded_by(RUN_VERB, ARGUMENTS=["convert", *words], HEAVY=HEAVY) == {"code": 2, "loaded": []}


LOAD = """
import importlib, json, sys
for name in MODULES:
    importlib.import_module(name)
print(json.dumps(sorted(name for name in HEAVY if name in sys.modules)))
"""


def modules_of(*packages: str, ray: bool) -> list[str]:
    """Every module of some packages; without the files that are named for Ray where `ray` is False."""
    paths = [path for package in packages for path in sorted((PROJECT / package).rglob("*.py"))]
    return [
        ".".join(path.relative_to(PROJECT).with_suffix("").parts)
        for path in paths
        if path.stem not in ("__main__", "__init__") and (ray or not path.stem.startswith("ray_"))
    ]


PURE = ("pipeline/spec", "pipeline/plan", "pipeline/artifacts", "pipeline/data", "pipeline/cluster")


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (modules_of("pipeline/training", ray=True), {"jax", "flax", "orbax", "mlflow"}),
        (modules_of("pipeline/models", "pipeline/serving", ray=True), {"torch", "transformers", "mlflow"}),
        (modules_of(*PURE, ray=False), set(HEAVY)),
        (modules_of("pipeline/execution", "pipeline/cli", ray=False), {"torch", "jax", "ray", "mlflow", "flax"}),
        (modules_of("pipeline/tracking", ray=False), {"torch", "jax", "ray", "flax"}),
    ],
    ids=["training", "serving", "pure", "execution", "tracking"],
)
def test_each_side_loads_its_own_framework_only(modules: list[str], forbidden: set[str]) -> None:
    loaded = set(loaded_by(LOAD, MODULES=modules, HEAVY=HEAVY))
    assert loaded & forbidden == set()
