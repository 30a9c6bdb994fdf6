"""The transformers model of a checkpoint, for comparison.

Owns the loading of weights into the torch module without the conversion rules: names go straight to the module's own
parameters, so a fault in a rule cannot hide on both sides of a comparison. Knows nothing of Flax. The one decision: the
reference runs in float32 with the plain attention formula.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from converters.operations import FLOAT_DTYPES
from converters.readers import open_source
from converters.wrappers import canonical_names
from pipeline.errors import ConversionError
from pipeline.models.config_file import read_config


def load_torch_model(checkpoint: Path) -> torch.nn.Module:
    """The torch model of the checkpoint directory, float32 on the CPU, in evaluation mode.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: `config.json` is missing or unreadable.
        ConversionError: its tensors are not those of the model that its config describes; lists every complaint.
    """
    source = open_source(checkpoint)
    config = read_config(source.directory)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="eager"
    )
    model.tie_weights()
    wanted = dict(model.state_dict())
    stored = canonical_names(source.headers)
    # A tied parameter has several names; each storage needs one of them.
    filled = {wanted[name].data_ptr() for name in wanted if name in stored}
    complaints = [
        f"  {name}: the torch model needs it, the checkpoint lacks it"
        for name, parameter in wanted.items()
        if parameter.data_ptr() not in filled
    ]
    complaints += [
        f"  {name}: checkpoint has shape {source.headers[stored[name]].shape}, torch model {tuple(wanted[name].shape)}"
        for name in wanted
        if name in stored and source.headers[stored[name]].shape != tuple(wanted[name].shape)
    ]
    if complaints:
        raise ConversionError(f"{checkpoint}: does not fill the torch model:\n" + "\n".join(sorted(complaints)))
    with torch.no_grad():
        for name in (name for name in wanted if name in stored):
            wanted[name].copy_(torch.from_numpy(source.read(stored[name]).astype(FLOAT_DTYPES["float32"])))
    return model.eval()
