"""`program.json` and `constants.safetensors`: a traced program on disk.

Owns the two files. Knows nothing of what is in a program. The one decision: both are read strictly and held against
each other before anything uses them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from pipeline.errors import ArtifactError
from pipeline.models.traced.dtypes import DTYPES
from pipeline.models.traced.program import Program
from pipeline.models.traced.program_reader import parse_program
from pipeline.models.traced.program_text import program_text

PROGRAM_FILE = "program.json"
CONSTANTS_FILE = "constants.safetensors"

Constants = Mapping[str, np.ndarray[Any, Any]]


def write_program(directory: Path, *, program: Program, constants: Constants) -> None:
    """Write both files into `directory`."""
    (directory / PROGRAM_FILE).write_text(program_text(program), encoding="utf-8")
    stored = {name: np.asarray(value, _stored_dtype(value.dtype), order="C") for name, value in constants.items()}
    save_file(stored, directory / CONSTANTS_FILE)


def _stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    # safetensors' numpy reader does not know bfloat16; float32 holds it exactly.
    return np.dtype(np.float32) if dtype == jnp.bfloat16 else dtype


def read_program(directory: Path) -> tuple[Program, dict[str, np.ndarray[Any, Any]]]:
    """The program of a model directory and its constants.

    Raises:
        ArtifactError: a file is missing, malformed, of another version, or they do not fit each other.
    """
    path = directory / PROGRAM_FILE
    try:
        program = parse_program(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{path}: not a traced program: {error}", hint="convert the checkpoint again with `via: trace`"
        ) from error
    return program, _read_constants(directory / CONSTANTS_FILE, program=program)


def _read_constants(path: Path, *, program: Program) -> dict[str, np.ndarray[Any, Any]]:
    try:
        constants = load_file(path)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ArtifactError(f"{path}: cannot be read: {error}") from error
    complaints = [f"  missing: {name}" for name in sorted(program.constants.keys() - constants.keys())]
    complaints += [f"  surplus: {name}" for name in sorted(constants.keys() - program.constants.keys())]
    wanted = {name: np.dtype(DTYPES[dtype]) for name, dtype in program.constants.items()}
    complaints += [
        f"  dtype: {name} is {value.dtype}, must be {_stored_dtype(wanted[name])}"
        for name, value in constants.items()
        if name in wanted and value.dtype != _stored_dtype(wanted[name])
    ]
    if complaints:
        raise ArtifactError(f"{path}: does not fit {PROGRAM_FILE} beside it:\n" + "\n".join(complaints))
    return {name: value.astype(wanted[name]) for name, value in constants.items()}
