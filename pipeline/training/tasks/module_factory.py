"""A module of the user's own: made by a factory, and held against the dataset before anything is trained.

Owns the import of `module:factory`, the build, and every check that one forward pass can make. Knows nothing of
sharding or steps. The one decision: the module is built twice from one seed and must come out equal, because every rank
builds its own copy and keeps a shard of it; a factory with randomness of its own would train a mixture.

Shapes: B rows.
"""

import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pipeline.errors import ParameterError, nearest_name
from pipeline.models.module_file import BATCH, InputSpec, ModuleFile
from pipeline.training.tasks.rows import ArrayRows

_TRIED_ROWS = 3
"""Examples of the forward pass that is made to see whether the module fits; more than one, and no round number."""


def build_module(factory: str, *, arguments: Mapping[str, Any], project_root: str, seed: int) -> nn.Module:
    """What the factory makes, with initial weights that depend on `seed`; leaves torch's RNG as it was.

    Args:
        factory: `module:function`.
        arguments: its keywords.
        project_root: looked into first for the module.
        seed: of torch's generator while the factory runs.

    Raises:
        ParameterError: it cannot be imported, takes other arguments, or gives no module that can be trained.
    """
    function = _import(factory, project_root=project_root)
    _check_arguments(factory, function, arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = function(**arguments)
    if not isinstance(made, nn.Module):
        raise ParameterError(
            f"model {factory}: gave {type(made).__name__}; a torch.nn.Module is wanted",
            hint="the factory returns the module itself, not a class or a state dict",
        )
    return made


def output_of(factory: str, outputs: Any) -> torch.Tensor:
    """The tensor that the loss is taken of: the output itself, or what is called `logits` in it.

    Raises:
        ParameterError: there is no such tensor.
    """
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    else:
        found = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "logits", None)
    if isinstance(found, torch.Tensor):
        return found
    names = f" with {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
    raise ParameterError(
        f"model {factory}: forward returned {type(outputs).__name__}{names}",
        hint="return a tensor, or a mapping or object with `logits`",
    )


def module_file(factory: str, *, arguments: Mapping[str, Any], dataset: ArrayRows) -> ModuleFile:
    """What is written beside the checkpoint, so that others can load it."""
    return ModuleFile(
        factory=factory,
        arguments=dict(arguments),
        inputs={name: InputSpec(shape=(BATCH, *spec.shape), dtype=spec.dtype) for name, spec in dataset.inputs.items()},
    )


def check_module(
    factory: str, *, arguments: Mapping[str, Any], project_root: str, dataset: ArrayRows, loss: str, seed: int
) -> nn.Module:
    """Build the module and run it once on a few training examples, in evaluation mode; returns it.

    Raises:
        ParameterError: whatever stands against training it on this dataset with this loss; says what would fit.
    """
    _check_loss(loss, dataset)
    model = build_module(factory, arguments=arguments, project_root=project_root, seed=seed)
    _check_parameters(factory, model)
    again = build_module(factory, arguments=arguments, project_root=project_root, seed=seed)
    _check_repeatable(factory, model, again)
    _check_signature(factory, model, dataset)
    model.eval()
    rows = dataset.train_rows(0, rows_per_step=_TRIED_ROWS, rank=0, world_size=1, seed=seed)
    inputs = {name: torch.from_numpy(rows[name]) for name in dataset.inputs}
    with torch.no_grad():
        try:
            outputs = model(**inputs)
        except Exception as error:  # the boundary: whatever a forward of the user's own raises
            given = ", ".join(f"{name} {list(value.shape)} {value.dtype}" for name, value in inputs.items())
            raise ParameterError(
                f"model {factory}: forward failed on {given}: {type(error).__name__}: {error}",
                hint="the arrays of the dataset, with the examples along the first axis, are what forward is given",
            ) from error
    _check_output(factory, output_of(factory, outputs), dataset=dataset, num_rows=_TRIED_ROWS)
    return model


def _import(factory: str, *, project_root: str) -> Any:
    if project_root not in sys.path:
        sys.path.insert(0, project_root)
    module_name, _, name = factory.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ParameterError(
            f"model {factory}: cannot be imported: {error}",
            hint=f"the module lies in the project ({project_root}) or is installed; it may not need jax or flax",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        near = nearest_name(name, [each for each in vars(module) if not each.startswith("_")])
        raise ParameterError(
            f"model {factory}: module {module_name!r} has no function {name!r}"
            + (f"; did you mean {near!r}?" if near else "")
        )
    return function


def _check_arguments(factory: str, function: Any, arguments: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ParameterError(
            f"model {factory}: {error}; model_arguments has: {', '.join(arguments) or 'nothing'}",
            hint=f"the factory is {factory.partition(':')[2]}{inspect.signature(function)}",
        ) from error


def _check_loss(loss: str, dataset: ArrayRows) -> None:
    wanted = "mean_squared_error" if dataset.num_classes is None else "cross_entropy"
    if loss != wanted:
        held = "floats" if dataset.num_classes is None else "classes"
        raise ParameterError(
            f"loss: {loss}, but the target {dataset.target!r} of the dataset holds {held}",
            hint=f"set `loss: {wanted}`, or make the target of `data.arrays` integers for classes, floats for values",
        )


def _check_parameters(factory: str, model: nn.Module) -> None:
    named = dict(model.named_parameters())
    problems = [] if any(each.requires_grad for each in named.values()) else ["no parameter to train"]
    problems += [
        f"{name} is {parameter.dtype}; parameters are float32"
        for name, parameter in named.items()
        if parameter.dtype != torch.float32
    ]
    problems += [
        f"{name} is a single number; FSDP needs a shape such as (1,)" for name, p in named.items() if p.ndim == 0
    ]
    problems += [
        f"{name} has no shape yet"
        for name, parameter in named.items()
        if isinstance(parameter, nn.parameter.UninitializedParameter)
    ]
    if problems:
        raise ParameterError(f"model {factory}: it cannot be trained: " + "; ".join(problems))


def _check_repeatable(factory: str, first: nn.Module, second: nn.Module) -> None:
    ours, theirs = first.state_dict(), second.state_dict()
    differing = [name for name in ours if name not in theirs or not torch.equal(ours[name], theirs[name])]
    if differing or ours.keys() != theirs.keys():
        raise ParameterError(
            f"model {factory}: built twice from one seed it has other values in {', '.join(differing[:5]) or 'names'}",
            hint="draw initial weights from torch's own generator, and nothing else: every rank builds its own copy",
        )


def _check_signature(factory: str, model: nn.Module, dataset: ArrayRows) -> None:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**dict.fromkeys(dataset.inputs))
    except TypeError as error:
        raise ParameterError(
            f"model {factory}: forward does not take the arrays of the dataset: {error}; forward{signature}, the "
            f"dataset has: {', '.join(dataset.inputs)} (and the target {dataset.target})",
            hint="give the parameters of forward the names of the arrays, or the arrays the names of the parameters",
        ) from error


def _check_output(factory: str, output: torch.Tensor, *, dataset: ArrayRows, num_rows: int) -> None:
    target = dataset.target_shape
    if dataset.num_classes is None:
        is_right = tuple(output.shape) == (num_rows, *target)
        wanted = f"[{', '.join(['batch', *map(str, target)])}], the shape of the target {dataset.target!r}"
    else:
        shape = tuple(output.shape)
        is_right = len(shape) == 2 + len(target) and (shape[0], *shape[2:]) == (num_rows, *target)
        is_right = is_right and shape[1] >= dataset.num_classes
        wanted = (
            f"[{', '.join(['batch', 'classes', *map(str, target)])}] with at least {dataset.num_classes} classes, for "
            f"the target {dataset.target!r}"
        )
    if not is_right:
        raise ParameterError(
            f"model {factory}: for {num_rows} examples forward gave {list(output.shape)}; wanted is {wanted}",
            hint="the last layer decides this shape",
        )
    if not output.dtype.is_floating_point:
        raise ParameterError(f"model {factory}: forward gave {output.dtype}; logits and values are floats")
