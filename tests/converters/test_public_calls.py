"""`import converters` loads nothing; its calls are there when they are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import converters

PACKAGE = Path(converters.__file__).parent
HEAVY = ("torch", "jax", "flax", "orbax", "transformers", "onnx", "numpy")


def test_importing_the_package_loads_nothing():
    script = f"import sys, converters; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_table_the_list_and_the_typed_names_are_the_same():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = {alias.name: node.module for node in typed.body for alias in node.names}
    assert {name: f"{module}:{name}" for name, module in imports.items()} == dict(converters.API)
    assert sorted(converters.API) == converters.__all__
    assert set(converters.API) <= set(dir(converters))


def test_no_module_has_the_name_of_a_public_call():
    """Importing `converters.convert` as a module would replace the function `convert`."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert modules & set(converters.API) == set()


def test_a_call_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'transform'; it has: check_parity, convert"):
        _ = converters.transform


def test_a_call_is_resolved_once():
    assert converters.convert is converters.convert
    assert converters.convert.__module__ == "converters.conversion"
