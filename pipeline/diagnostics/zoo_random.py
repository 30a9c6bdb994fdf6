"""Random parameters and statistics for models of the zoo.

Owns the noise. Knows no model. The one decision: nothing stays zero, one, or equal to another, for what is only
multiplied by one or added as zero proves nothing.
"""

import torch

_NOISE = 0.05
_SEED = 1


def randomize(module: torch.nn.Module) -> None:
    """Make every parameter and statistic random, so that none is zero, one, or equal to another."""
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * _NOISE)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * _NOISE)
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
