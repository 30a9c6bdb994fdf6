"""What `data.arrays` reads from outside, as digests.

Owns the identity of its source. Loads nothing heavy, for the planner asks on every `plan`. The one decision: a
function of the user's own is identified by the content of its module and by its name, like every function in a flow.
"""

from collections.abc import Mapping
from pathlib import Path

from pipeline.data.array_identity import BUILTIN_DIGITS, builtin_identity, file_identity, is_npz
from pipeline.errors import ParameterError
from pipeline.stages.parameters import DataArraysParameters
from pipeline.stages.user_module import function_digest, is_function


def digests(parameters: DataArraysParameters, project_root: Path) -> Mapping[str, str]:
    """Digest of what the source would be read as now, under the key `source`.

    Raises:
        ParameterError: there is no such source.
    """
    source = parameters.source
    if source == BUILTIN_DIGITS:
        return {"source": f"{source} {builtin_identity()}"}
    if is_npz(source):
        return {"source": file_identity(project_root / source)}
    if not is_function(source):
        raise ParameterError(
            f"source {source!r}: not a source of arrays",
            hint=f"allowed: {BUILTIN_DIGITS!r}, a path that ends with .npz, or module:function of the project",
        )
    return {"source": function_digest(source, project_root=project_root, where="source")}
