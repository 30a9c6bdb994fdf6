"""Parameters that a model has under several names.

Owns which name is the first one. Knows nothing of models. The one decision: a tied tensor is stored and sharded once,
under its first name.
"""

from collections.abc import Mapping

from torch import nn


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names that stand for a parameter listed under another name, with that name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name != first[id(parameter)]
    }


def tie(model: nn.Module, names: Mapping[str, str]) -> None:
    """Make each name stand for the parameter of the other name again, after modules were given parameters anew."""
    for name, kept in names.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(kept))
