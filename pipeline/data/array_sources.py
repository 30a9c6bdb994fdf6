"""Where arrays come from: a dataset that scikit-learn ships, an `.npz` file, a function of the user's own.

Owns the way from a source's name to named arrays. Knows nothing of splits or files of a dataset. The one decision: a
source is read whole and without running anything that a file contains (`allow_pickle=False`).

Shapes: N examples.
"""

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from pipeline.data.array_identity import BUILTIN_DIGITS, is_npz
from pipeline.errors import ParameterError

DIGITS_LEVELS = 16.0
"""Pixels of the digits are counts from 0 to 16."""


def read_arrays(source: str, *, arguments: Mapping[str, Any], project_root: Path) -> dict[str, Any]:
    """The arrays of `source` by name.

    Args:
        source: `builtin:digits`, a path to an `.npz` file, or `module:function`.
        arguments: what the function is called with.
        project_root: where relative paths start.

    Raises:
        ParameterError: the source cannot be read or gives no mapping of arrays.
    """
    if source == BUILTIN_DIGITS:
        return digits()
    if is_npz(source):
        return _read_npz(project_root / source)
    return _call(source, arguments=arguments)


def digits() -> dict[str, Any]:
    """1,797 handwritten digits: `pixels` float32 [N, 1, 8, 8] from 0 to 1, `labels` int64 [N] from 0 to 9.

    The test part of the UCI set "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998), as
    scikit-learn ships it.
    """
    found = load_digits()
    return {"pixels": (found.images / DIGITS_LEVELS).astype(np.float32)[:, None], "labels": found.target}


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise ParameterError(
            f"source {path}: cannot be read as an .npz file: {error}",
            hint="write it with numpy.savez(path, pixels=..., labels=...); arrays of Python objects are never loaded",
        ) from error


def _call(source: str, *, arguments: Mapping[str, Any]) -> dict[str, Any]:
    module_name, _, name = source.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ParameterError(
            f"source {source!r}: cannot be imported: {error}", hint="the module lies in the project or is installed"
        ) from error
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"source {source!r}: {error}", hint="name a Python function") from error
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ParameterError(
            f"source {source!r}: {error}", hint=f"`arguments` are its keywords: {name}{signature}"
        ) from error
    made = function(**arguments)
    if not isinstance(made, Mapping):
        raise ParameterError(
            f"source {source!r}: gave {type(made).__name__}; a mapping of names to arrays is wanted",
            hint='return {"pixels": ..., "labels": ...}',
        )
    return dict(made)
