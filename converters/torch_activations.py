"""What a torch module computes, as numpy arrays by name.

Owns running a module on a dict of inputs, the names of what it gives back, and looking at what its submodules give.
Knows nothing of Flax and of checkpoints. The one decision: submodules are watched by forward hooks, so the module runs
exactly the code that its users run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.models.description import Arrays


@torch.no_grad()
def torch_outputs(model: torch.nn.Module, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """Run `model` on `inputs` (by keyword of its `forward`); its float outputs by name, float32."""
    found = model(**{name: _tensor(array) for name, array in inputs.items()})
    return {name: _array(value) for name, value in _named(found) if torch.is_floating_point(value)}


def precise_activations(
    model: torch.nn.Module, inputs: Mapping[str, NDArray[Any]], paths: Iterable[str]
) -> Arrays | None:
    """What the submodules at `paths` give when `model` computes in float64, by path; the model comes back in float32.

    None where the module mixes in float32 values of its own, so that torch refuses to run it.
    """
    wide = {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in inputs.items()}
    try:
        with watching(model.double(), paths, dtype=torch.float64) as seen:
            torch_outputs(model, wide)
    except RuntimeError:
        return None
    finally:
        model.float()
    return seen


@contextmanager
def watching(model: torch.nn.Module, paths: Iterable[str], *, dtype: torch.dtype = torch.float32) -> Iterator[Arrays]:
    """Note what the submodules at `paths` give while the block runs, in `dtype` by path.

    Of a module that gives several values the first is noted; of one that runs several times the last run.

    Raises:
        AttributeError: there is no such submodule.
    """
    seen: Arrays = {}
    handles = [model.get_submodule(path).register_forward_hook(_noting(seen, path, dtype=dtype)) for path in paths]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _noting(seen: Arrays, path: str, *, dtype: torch.dtype) -> Callable[..., None]:
    def note(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        value = next((value for _, value in _named(output)), None)
        if value is not None:
            # A copy, for what follows may add to it in place, as ResNet's shortcuts do.
            seen[path] = _array(value, dtype=dtype).copy()

    return note


def _named(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an output: by key of a dict, by position of a tuple, alone as `output`."""
    if isinstance(value, torch.Tensor):
        yield "output", value
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items() if isinstance(item, torch.Tensor))
    elif isinstance(value, list | tuple):
        yield from ((f"output_{i}", item) for i, item in enumerate(value) if isinstance(item, torch.Tensor))


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    # torch counts tokens in int64; the arrays of a description are int32, as jax has them.
    return torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array)


def _array(value: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> NDArray[Any]:
    return value.detach().to(dtype).cpu().numpy()
