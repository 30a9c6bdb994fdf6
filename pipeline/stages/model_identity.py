"""What `train.fsdp` reads from outside beside files, as digests.

Owns the identity of a model that is `module:factory`, and of starting weights that no stage made. Loads nothing heavy,
for the planner asks on every `plan`. The one decision: a factory is identified by its name and the content of its
module; a config file is a source file.
"""

from collections.abc import Mapping
from pathlib import Path

from pipeline.stages.checkpoint_identity import digest_of
from pipeline.stages.parameters import TrainFsdpParameters
from pipeline.stages.user_module import function_digest, is_function


def digests(parameters: TrainFsdpParameters, project_root: Path) -> Mapping[str, str]:
    """Name and digest of the model's factory, under the key `model`, where the model is no config file.

    And the digest of `initial`, where it is a place and no output of a stage.

    Raises:
        ParameterError: there is no such module, or there are no such weights.
    """
    made = {}
    if parameters.model is not None and is_function(parameters.model):
        made["model"] = function_digest(parameters.model, project_root=project_root, where="model")
    if isinstance(parameters.initial, str):
        made["initial"] = digest_of(parameters.initial, project_root)
    return made
