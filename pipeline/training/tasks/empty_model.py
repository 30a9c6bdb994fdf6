"""A transformers model whose parameters are yet to be given.

Owns its construction. Knows nothing of weights. The one decision: parameters are put on the meta device as the model is
built, one by one, and buffers are not: what a model computes itself (rotary frequencies) is right from the start and on
every rank, and no full copy of the weights ever exists.
"""

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from pipeline.training.tasks.model import build_model


def build_empty(config: PretrainedConfig) -> nn.Module:
    """The model with float32 parameters on the meta device, tied ones tied, and real buffers."""
    registered = register_module_parameter_registration_hook(_on_meta)
    try:
        with no_init_weights():
            model = build_model(config, seed=0)
            model.tie_weights()
    finally:
        registered.remove()
    return model


def _on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """What is registered in place of `parameter`; None leaves it."""
    if parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
