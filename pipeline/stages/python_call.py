"""`python.call`: a stage of the user's own.

Owns what makes the user's function part of the fingerprint. The one decision: its module is identified by the content
of its source file, found without importing it.
"""

from collections.abc import Mapping
from pathlib import Path

from pipeline.stages.parameters import PythonCallParameters
from pipeline.stages.user_module import module_digest


def digests(parameters: PythonCallParameters, project_root: Path) -> Mapping[str, str]:
    """Digest of the module that `call` names.

    Raises:
        ParameterError: there is no such module.
    """
    name = parameters.call.partition(":")[0]
    return {f"module {name}": module_digest(name, project_root=project_root, where="python.call")}
