"""What `train.fsdp` reads from outside beside files, as digests.

Owns the identity of a model that is `module:factory`. Loads nothing heavy, for the planner asks on every `plan`. The
one decision: a factory is identified by its name and the content of its module; a config file is a source file.
"""

from collections.abc import Mapping
from pathlib import Path

from pipeline.stages.parameters import TrainFsdpParameters
from pipeline.stages.user_module import function_digest, is_function


def digests(parameters: TrainFsdpParameters, project_root: Path) -> Mapping[str, str]:
    """Name and digest of the model's factory, under the key `model`; nothing where the model is a config file.

    Raises:
        ParameterError: there is no such module.
    """
    if not is_function(parameters.model):
        return {}
    return {"model": function_digest(parameters.model, project_root=project_root, where="model")}
