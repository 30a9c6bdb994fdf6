"""A torch module of the user's own, with the weights of its checkpoint, for comparison.

Owns the loading by the module's own names. Knows nothing of Flax and of tracing. The one decision: the factory that
trained the module makes the reference, so what is compared is what its author runs.
"""

from pathlib import Path

import torch

from converters.operations import FLOAT_DTYPES, Array
from converters.readers import open_source
from converters.wrappers import canonical_names
from pipeline.errors import ConversionError
from pipeline.models.module_file import ModuleFile
from pipeline.training.tasks.module_factory import build_module


def load_own_module(checkpoint: Path, *, project_root: Path) -> torch.nn.Module:
    """The module that `module.json` describes, float32 on the CPU, in evaluation mode.

    Args:
        checkpoint: with `module.json`.
        project_root: where its factory is looked for first.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: `module.json` is malformed.
        ParameterError: the factory cannot be imported or gives no module.
        ConversionError: the tensors are not those of the module; lists every complaint.
    """
    source = open_source(checkpoint)
    described = ModuleFile.read(source.directory)
    module = build_module(described.factory, arguments=described.arguments, project_root=str(project_root), seed=0)
    module = module.to(torch.float32)
    stored = canonical_names(source.headers)
    wanted = module.state_dict()
    storages = {wanted[name].data_ptr() for name in wanted if name in stored}
    complaints = [
        f"  {name}: the module needs it, the checkpoint lacks it"
        for name, value in wanted.items()
        if name not in stored and value.data_ptr() not in storages  # a tied parameter needs one of its names
    ]
    complaints += [f"  {name}: the module has no such tensor" for name in stored if name not in wanted]
    complaints += [
        f"  {name}: checkpoint has shape {source.headers[stored[name]].shape}, module {tuple(value.shape)}"
        for name, value in wanted.items()
        if name in stored and source.headers[stored[name]].shape != tuple(value.shape)
    ]
    if complaints:
        raise ConversionError(
            f"{checkpoint}: does not fill what {described.factory} makes:\n" + "\n".join(complaints),
            hint="the factory, or what it calls, has changed since the checkpoint was written",
        )
    with torch.no_grad():
        for name in wanted:
            if name in stored:
                wanted[name].copy_(_tensor(source.read(stored[name])))
    return module.eval()


def _tensor(array: Array) -> torch.Tensor:
    # torch cannot take numpy's bfloat16; widening it is exact.
    return torch.from_numpy(array.astype(FLOAT_DTYPES["float32"]) if array.dtype in FLOAT_DTYPES.values() else array)
