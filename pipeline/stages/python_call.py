"""`python.call`: a stage of the user's own.

Owns what makes the user's function part of the fingerprint. The one decision: the source file that defines the
function is part of its identity, found without importing it; further files are declared in `sources`.
"""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.artifacts.manifest import sha256_of
from pipeline.errors import ParameterError
from pipeline.stages.parameters import PythonCallParameters


def digests(parameters: PythonCallParameters, project_root: Path) -> Mapping[str, str]:
    """Digest of the module that `call` names.

    Raises:
        ParameterError: there is no such module.
    """
    name = parameters.call.partition(":")[0]
    path = _find_module(name, project_root)
    return {f"module {name}": sha256_of(path)}


def _find_module(name: str, project_root: Path) -> Path:
    relative = Path(*name.split("."))
    for candidate in (project_root / relative.with_suffix(".py"), project_root / relative / "__init__.py"):
        if candidate.is_file():
            return candidate
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except ValueError:
        spec = None
    for root in (spec.submodule_search_locations or ()) if spec else ():
        inner = Path(root, *name.split(".")[1:])
        for candidate in (inner.with_suffix(".py"), inner / "__init__.py"):
            if candidate.is_file():
                return candidate
    if spec is not None and spec.origin and "." not in name:
        return Path(spec.origin)
    raise ParameterError(
        f"python.call: no module {name!r}; looked into {project_root} and {len(sys.path)} directories of sys.path",
        hint="`call` is MODULE:FUNCTION, and the module lies in the project or is installed",
    )
