"""Heavy packages are imported only in the files named for them, and files stay readable."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
FILES = sorted((*PROJECT.glob("pipeline/**/*.py"), *PROJECT.glob("converters/**/*.py")))

# Package -> where it may be imported; the inventory of heavy files.
ALLOWED = {
    "torch": (
        "pipeline/training/*.py",
        "pipeline/evaluation/torch_*.py",
        "pipeline/diagnostics/bench_train_*.py",
        "pipeline/diagnostics/bench_serve_torch.py",
        "converters/torch_*.py",
        "converters/trace/*.py",
        "converters/model_pair.py",
        "pipeline/diagnostics/zoo_*.py",
        "pipeline/diagnostics/trace_*.py",
    ),
    "transformers": (
        "pipeline/training/*.py",
        "pipeline/evaluation/torch_*.py",
        "pipeline/diagnostics/bench_serve_torch.py",
        "converters/torch_*.py",
        "converters/trace/*.py",
        "pipeline/diagnostics/zoo_*.py",
        "pipeline/diagnostics/trace_*.py",
    ),
    "peft": ("pipeline/training/start/adapters.py",),
    "jax": (
        "pipeline/diagnostics/bench_serve_ours.py",
        "pipeline/models/*.py",
        "pipeline/serving/*.py",
        "pipeline/evaluation/flax_*.py",
        "pipeline/stages/evaluate_*.py",
        "converters/flax_*.py",
        "pipeline/diagnostics/trace_*.py",
    ),
    "flax": (
        "pipeline/models/*.py",
        "pipeline/serving/*.py",
        "pipeline/evaluation/flax_*.py",
        "converters/flax_*.py",
        "converters/loading.py",
        "converters/model_pair.py",
        "pipeline/diagnostics/trace_*.py",
    ),
    "orbax": ("pipeline/models/parameter_writer.py", "pipeline/diagnostics/bench_convert.py"),
    "ray": ("*/ray_*.py",),
    "mlflow": ("pipeline/tracking/mlflow_*.py",),
    "accelerate": ("pipeline/diagnostics/bench_train_accelerate.py",),
    "lightning_fabric": ("pipeline/diagnostics/bench_train_fabric.py",),
    "llguidance": ("pipeline/serving/grammar/*.py",),
    "onnx": ("converters/onnx_*.py",),
    "onnxruntime": ("converters/torch_onnx_*.py", "pipeline/diagnostics/bench_serve_onnx.py"),
    "llama_cpp": ("pipeline/diagnostics/bench_serve_llama.py",),
    "fsspec": (
        "pipeline/artifacts/fsspec_store.py",
        "pipeline/data/remote*.py",
        "pipeline/training/*.py",
        "converters/location.py",
    ),
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def relative(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


# One test over all files, not one a file: they are read and parsed once, and every offender is named at once.
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def test_heavy_packages_are_imported_only_where_they_belong() -> None:
    misplaced = [
        f"{name} in {relative(path)}"
        for path, tree in TREES.items()
        for name in sorted(set(imported(tree)) & set(ALLOWED))
        if not any(fnmatch(relative(path), pattern) for pattern in ALLOWED[name])
    ]
    assert misplaced == []


def test_imports_stand_at_the_top() -> None:
    inside = [
        f"{relative(path)}:{node.lineno}"
        for path, tree in TREES.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert inside == []


def test_every_module_says_what_it_owns() -> None:
    assert [relative(path) for path, tree in TREES.items() if not ast.get_docstring(tree)] == []


def test_files_and_functions_hold_one_idea() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    assert [f"{relative(path)} has {count} lines" for path, count in lines.items() if count > MAX_FILE_LINES] == []
    long = [
        f"{relative(path)}:{node.lineno} {node.name} has {length} lines"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_file_is_called_by_what_it_is_not() -> None:
    refused = {"utils", "helpers", "common", "base", "manager", "misc"}
    assert [relative(path) for path in FILES if path.stem in refused] == []


def test_only_the_command_line_prints() -> None:
    printing = [
        f"{relative(path)}:{node.lineno}"
        for path in FILES
        if not relative(path).startswith("pipeline/cli/")
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


def test_broad_excepts_stand_only_at_process_boundaries() -> None:
    boundaries = {
        "pipeline/data/background.py",
        "pipeline/diagnostics/bench_serve_side.py",
        "pipeline/diagnostics/bench_train.py",
        "pipeline/diagnostics/zoo_transformers.py",
        "pipeline/cli/main.py",
        "pipeline/execution/worker.py",
        "pipeline/tracking/delivery.py",
        "pipeline/serving/engine/engine.py",
        "pipeline/serving/engine/micro_batcher.py",
        "pipeline/serving/engine/engine_thread.py",
        "pipeline/training/checkpoints/consensus.py",
        "pipeline/training/checkpoints/flight.py",
        "pipeline/training/launch/spawn.py",
    }
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in FILES
        if relative(path) not in boundaries
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")))
        and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
    ]
    assert found == []
