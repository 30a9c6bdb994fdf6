"""Functions of the user's own that a flow names as `module:function`.

Owns the form of such a name and the part of its identity that can be told without importing anything. The one decision:
the source file that defines the function is part of the identity of the stage that calls it, together with the
function's name; further files are declared in `sources`.
"""

import importlib.util
import re
import sys
from pathlib import Path

from pipeline.artifacts.manifest import sha256_of
from pipeline.errors import ParameterError

FUNCTION_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
_FUNCTION = re.compile(FUNCTION_PATTERN)


def is_function(text: str) -> bool:
    """True for `module:function`."""
    return _FUNCTION.match(text) is not None


def module_digest(name: str, *, project_root: Path, where: str) -> str:
    """sha256 of the source file of the module `name`.

    Args:
        name: dotted.
        project_root: looked into first.
        where: the parameter that names it, for the error.

    Raises:
        ParameterError: there is no such module.
    """
    return sha256_of(_find_module(name, project_root, where=where))


def function_digest(function: str, *, project_root: Path, where: str) -> str:
    """What identifies `module:function`: its name, and the content of its module; see `module_digest`."""
    module, _, name = function.partition(":")
    return f"{name} of sha256:{module_digest(module, project_root=project_root, where=where)}"


def _find_module(name: str, project_root: Path, *, where: str) -> Path:
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
        f"{where}: no module {name!r}; looked into {project_root} and {len(sys.path)} directories of sys.path",
        hint="write MODULE:FUNCTION, where the module lies in the project or is installed",
    )
