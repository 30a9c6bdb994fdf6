"""Which parameter is updated how.

Owns patterns over parameter names: groups with a rate or decay of their own, what is frozen, and which matrices are
Muon's. Knows nothing of optimizers. The one decision: patterns are held against the names of the whole model before it
is cut, so a pattern that means nothing is an error on every rank and not a group that is silently empty.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from pipeline.errors import ParameterError
from pipeline.training.config import OptimizerName, ParameterGroup, TrainConfig

_MAX_NEAR = 5
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRule:
    """How a parameter is updated."""

    optimizer: OptimizerName
    learning_rate_ratio: float
    weight_decay: float


def hidden_matrices(model: nn.Module, blocks: Iterable[nn.Module]) -> frozenset[str]:
    """Names of the matrices inside blocks that are multiplied: what Muon is for.

    Embeddings, heads, norms and biases are not (Jordan et al., "Muon: An optimizer for hidden layers in neural
    networks", 2024); neither are kernels of convolutions, which have more than two dims.
    """
    modules = {id(each) for block in blocks for each in block.modules() if not isinstance(each, nn.Embedding)}
    return frozenset(
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if id(module) in modules
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 2
    )


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take the gradient away from every parameter that a pattern matches under any of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(re.search(pattern, name) for pattern in patterns):
            parameter.requires_grad_(False)


def check_patterns(model: nn.Module, config: TrainConfig, *, matrices: frozenset[str]) -> None:
    """Hold `freeze` and `parameter_groups` against the names of the whole model.

    Args:
        model: before it is frozen, sharded or cut.
        config: the run.
        matrices: `hidden_matrices` of the model.

    Raises:
        ParameterError: a pattern matches nothing, or nothing that is left to it; a group asks Muon for what is no
            matrix; nothing would be trained. All of them at once.
    """
    names = _names_by_parameter(model)
    frozen = {id(item) for item in model.parameters() if _matches(config.freeze, names[id(item)])}
    problems = [
        f"freeze: {pattern!r} matches no parameter{_near(pattern, names)}"
        for pattern in config.freeze
        if not any(_matches([pattern], each) for each in names.values())
    ]
    taken = set(frozen)
    for group in config.parameter_groups:
        matched = [item for item in model.parameters() if _matches([group.match], names[id(item)])]
        left = [item for item in matched if id(item) not in taken]
        taken |= {id(item) for item in left}
        if not matched:
            problems.append(f"parameter_groups: {group.match!r} matches no parameter{_near(group.match, names)}")
        elif not left:
            problems.append(f"parameter_groups: all that {group.match!r} matches is frozen or in an earlier group")
        if group.optimizer == "muon" and any(item.ndim != 2 for item in left):
            others = [names[id(item)][0] for item in left if item.ndim != 2]
            problems.append(f"parameter_groups: {group.match!r} with optimizer: muon has no matrices: {_some(others)}")
    if len(frozen) == len(names):
        problems.append(f"freeze: {', '.join(map(repr, config.freeze))} leaves nothing to train")
    if config.optimizer == "muon" and not matrices:
        problems.append("optimizer: muon, but the model has no matrix inside a block (ModuleList or Sequential)")
    if problems:
        raise ParameterError(
            "; ".join(problems),
            hint="patterns are regular expressions, searched for anywhere in a name; anchor them with ^ and $",
        )


def rule_of(names: Sequence[str], *, num_dims: int, is_hidden_matrix: bool, config: TrainConfig) -> UpdateRule:
    """The rule of one trained parameter: that of the first group that matches one of its names, else the run's."""
    found = next((each for each in config.parameter_groups if _matches([each.match], names)), None)
    group = found or ParameterGroup(match="")
    return UpdateRule(
        optimizer=group.optimizer or (config.optimizer if is_hidden_matrix else "adamw"),
        learning_rate_ratio=group.learning_rate_ratio,
        weight_decay=group.weight_decay
        if group.weight_decay is not None
        else (config.weight_decay if num_dims >= 2 else 0.0),
    )


def rules_of(
    model: nn.Module, config: TrainConfig, *, matrices: frozenset[str]
) -> dict[UpdateRule, list[nn.Parameter]]:
    """Trained parameters by their rule, in the order of the model."""
    names = _names_by_parameter(model)
    found: dict[UpdateRule, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            own = names[id(parameter)]
            rule = rule_of(own, num_dims=parameter.ndim, is_hidden_matrix=not matrices.isdisjoint(own), config=config)
            found.setdefault(rule, []).append(parameter)
    return found


def _names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, the one it is kept under first; on a part of a model also those elsewhere.

    Both copies of a parameter that two stages of a pipeline have are so in one group.
    """
    aliases: Mapping[str, str] = getattr(model, "aliases", {})
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for alias, first in aliases.items():
        for own in names.values():
            if first in own and alias not in own:
                own.append(alias)
    return names


def _matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def _near(pattern: str, names: Mapping[int, Sequence[str]]) -> str:
    """The names with a word most like the pattern, else all; blocks that differ in their number alone once."""
    forms = list(dict.fromkeys(_NUMBERS.sub("N", name) for own in names.values() for name in own))
    words = {form: set(re.split(r"[._]", form)) for form in forms}
    like = set(difflib.get_close_matches(pattern, set().union(*words.values()), n=1))
    near = [form for form in forms if not like.isdisjoint(words[form])] or forms
    return f"; near it (N is a number): {_some(near)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NEAR]) + (", ..." if len(names) > _MAX_NEAR else "")
