"""Matrix products of blocks in float8, by torchao.

Owns which layers compute in it and what stands against that. Knows nothing of devices. The one decision: scales are a
row's (torchao's rowwise recipe), and everything that is sent between ranks stays bfloat16 or float32, so float8 is a
matter of one rank's products alone.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterable

from torch import nn

from pipeline.errors import ParameterError

_ALIGNED = 16
"""Inner dims of scaled float8 products are multiples of it (torch._scaled_mm)."""
_MAX_NAMED = 5


def check_float8(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Refuse what cannot compute in float8.

    Raises:
        ParameterError: torchao is not installed, a linear layer of a block has a size that is no multiple of 16, or
            there is none; names the layers with their sizes.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ParameterError(
            "precision: float8 needs torchao, which is not installed here",
            hint="pip install 'torch-jax-pipeline[float8]' on every node, or set `precision: bfloat16`",
        )
    layers = float8_layers(model, blocks)
    if not layers:
        raise ParameterError(
            "precision: float8 is for linear layers inside blocks; the model has none", hint="set `precision: bfloat16`"
        )
    odd = [
        f"{name} {layer.out_features} x {layer.in_features} "
        f"(remainders {layer.out_features % _ALIGNED} and {layer.in_features % _ALIGNED})"
        for name, layer in layers.items()
        if layer.out_features % _ALIGNED or layer.in_features % _ALIGNED
    ]
    if odd:
        more = f" and {len(odd) - _MAX_NAMED} more" if len(odd) > _MAX_NAMED else ""
        raise ParameterError(
            f"precision: float8 multiplies matrices whose sizes are multiples of {_ALIGNED}; "
            f"{', '.join(odd[:_MAX_NAMED])}{more} are not",
            hint="round hidden_size, intermediate_size and head_dim of the model up, or set `precision: bfloat16`",
        )


def float8_layers(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, nn.Linear]:
    """Linear layers inside blocks, by name; the head stays in bfloat16, as torchtitan leaves it, and so do adapters."""
    inside = {id(each) for block in blocks for each in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside and ".lora_" not in name
    }


def use_float8(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Replace the linear layers of blocks, in place; called before blocks are compiled and sharded."""
    names = set(float8_layers(model, blocks))
    float8 = importlib.import_module("torchao.float8")
    recipe = float8.Float8LinearConfig.from_recipe_name("rowwise")
    float8.convert_to_float8_training(
        model,
        # The tokens of a pass are an inner dim too, in the gradient of a weight, and any number of them is allowed.
        config=dataclasses.replace(recipe, pad_inner_dim=True),
        module_filter_fn=lambda _, name: name in names,
    )
