"""Weights that a training starts from, placed on a model that is sharded already.

Owns what training asks of stored weights, the check that they are those of the model, and their way onto the ranks.
Knows nothing of file formats: whoever launches training hands over a reader. The one decision: the weights are given to
torch.distributed.checkpoint as a storage of one chunk a tensor, so its planner, which knows every placement there is,
says what a rank needs; a rank holds its shards and one tensor at a time, whatever the world size.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.futures import Future

from pipeline.errors import CheckpointError, nearest_name
from pipeline.training.parallel.pipeline import PipelineModel
from pipeline.training.parallel.tied_parameters import tied_names

_WRAPPED = ".base_layer."
"""What an adapter puts before the last part of the name of the layer that it wraps."""
_ADAPTER = re.compile(r"\.lora_[AB]\.")
_SHOWN = 12
"""Complaints of one kind in an error."""

Shape = tuple[int, ...]
StoredNames = dict[str, list[str]]
Draw = Callable[[str, Shape], torch.Tensor]
"""The first value of an adapter's parameter, float32, by its name and shape; the same on every rank."""


class StartingWeights(Protocol):
    """Stored weights of a whole model; `converters.starting_weights.NamedWeights` is one."""

    @property
    def origin(self) -> str:
        """Where they lie, for errors."""
        ...

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Of every tensor, by the name that the torch model has for it."""
        ...

    def config(self) -> Mapping[str, Any]:
        """The transformers config of the model, without what says how its tensors are stored.

        Raises:
            ArtifactError: there is none.
        """
        ...

    def sketch(self) -> str:
        """What tells these weights from others at little cost."""
        ...

    def read(self, name: str) -> npt.NDArray[Any]:
        """One tensor; floats in float32, whatever was stored.

        Raises:
            CheckpointError: the file is damaged.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainTensor:
    """A tensor of the model without adapters."""

    shape: Shape
    stored_name: str
    """Under which the weights have it: its own, or another of a tied tensor."""


def is_adapter(name: str) -> bool:
    """True for a parameter that LoRA adds."""
    return _ADAPTER.search(name) is not None


def base_name(name: str) -> str:
    """The name that a tensor has in the model without adapters."""
    return name.replace(_WRAPPED, ".")


def stored_names(names: Iterable[str], weights: StartingWeights, *, aliases: Mapping[str, list[str]]) -> StoredNames:
    """Names under which the weights have each tensor, the first to be read; none where they lack it.

    Args:
        names: of the model's tensors, without adapters; tied ones by their first name.
        weights: where they are.
        aliases: other names of tied tensors, by the first.
    """
    return {name: [each for each in (name, *aliases.get(name, ())) if each in weights.shapes] for name in names}


def check_weights(model: nn.Module, weights: StartingWeights) -> Mapping[str, PlainTensor]:
    """Hold the names and shapes of the weights against the whole model; its parameters may be on the meta device.

    Buffers that the model computes itself, and what its class says to ignore, may be stored and are not read.

    Returns:
        The plain model's tensors, tied ones once.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape; names all of them.
    """
    wanted = {base_name(name): tuple(value.shape) for name, value in _own(model) if not is_adapter(name)}
    aliases = _aliases(model)
    stored = weights.shapes
    known = {*wanted, *(alias for names in aliases.values() for alias in names)}
    # Old checkpoints hold them in every layer, as transformers once did.
    computed = {_end(name) for name, _ in model.named_buffers()}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    found = stored_names(wanted, weights, aliases=aliases)
    missing = [name for name, names in found.items() if not names]
    unexpected = [
        name
        for name in stored
        if name not in known and _end(name) not in computed and not any(pattern.search(name) for pattern in ignored)
    ]
    problems = [*_listed("the model has, and they lack", missing, near=unexpected)]
    problems += _listed("they have, and the model lacks", unexpected, near=[])
    problems += _listed(
        "have another shape",
        [
            f"{each} {stored[each]}, the model's is {wanted[name]}"
            for name, names in found.items()
            for each in names
            if stored[each] != wanted[name]
        ],
        near=[],
    )
    if problems:
        raise CheckpointError(
            f"the weights of {weights.origin} are not those of the model:\n  " + "\n  ".join(problems),
            hint="leave `model` out to take the config that comes with the weights, or name its own config file",
        )
    return {name: PlainTensor(shape=shape, stored_name=found[name][0]) for name, shape in wanted.items()}


def fill(model: nn.Module, weights: StartingWeights, *, device: torch.device, draw: Draw | None = None) -> None:
    """Give every parameter and stored buffer its value; called by all ranks, after sharding.

    Args:
        model: checked by `check_weights` before it was cut; parameters on the meta device get memory on `device`.
        weights: where the values are.
        device: of the shards.
        draw: values of adapters, which no file holds.

    Raises:
        CheckpointError: a file is damaged, or tied tensors differ.
    """
    give_memory(model, device=device)
    held = get_model_state_dict(model)
    for name in tied_names(model):
        held.pop(name, None)
    reader = _WeightsReader(held, weights, aliases=_aliases(model), draw=draw)
    try:
        dcp.load(held, storage_reader=reader)
    except dcp.api.CheckpointException as error:
        problems = sorted({str(failure[0]) for failure in error.failures.values()})
        raise CheckpointError(f"the weights of {weights.origin} cannot be read: " + "; ".join(problems)) from error


def _own(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint of the model holds, each tensor once."""
    tied = tied_names(model)
    yield from ((name, value) for name, value in model.state_dict().items() if name not in tied)


def _end(name: str) -> str:
    """The last module and its tensor: `rotary_emb.inv_freq`."""
    return ".".join(name.split(".")[-2:])


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Other names of tied parameters by the first name, without adapters; a part of a model has those of the whole."""
    names = defaultdict(list)
    for alias, first in (model.aliases if isinstance(model, PipelineModel) else tied_names(model)).items():
        names[base_name(first)].append(base_name(alias))
    return dict(names)


def _listed(what: str, names: list[str], *, near: list[str]) -> Iterator[str]:
    if not names:
        return
    shown = []
    for name in names[:_SHOWN]:
        guess = nearest_name(name, near)
        shown.append(f"{name} (they have {guess})" if guess else name)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    yield f"{len(names)} {what}: " + ", ".join(shown) + more


def give_memory(model: nn.Module, *, device: torch.device) -> None:
    """Memory for parameters on the meta device.

    Buffers stay what and where they are: no file holds those that are computed, and they do not go where shards are
    offloaded to.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    # FSDP notices new memory where it is applied: on the stages of a pipeline, not on what holds them together.
    for part in [stage.module for stage in model.stages] if isinstance(model, PipelineModel) else [model]:
        kept = [(module, dict(module.named_buffers(recurse=False))) for module in part.modules()]
        part.to_empty(device=device)
        for module, buffers in kept:
            module._buffers.update(buffers)


class _WeightsReader(dcp.StorageReader):
    """Starting weights, as DCP reads a checkpoint."""

    def __init__(
        self,
        held: Mapping[str, torch.Tensor],
        weights: StartingWeights,
        *,
        aliases: Mapping[str, list[str]],
        draw: Draw | None,
    ) -> None:
        self._held, self._weights, self._aliases, self._draw = held, weights, aliases, draw

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """One chunk a tensor, in the model's own names."""
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=value.dtype),
                    size=value.size(),
                    chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * value.dim()), sizes=value.size())],
                )
                for name, value in self._held.items()
            },
            storage_data={MetadataIndex(name, [0] * value.dim()): name for name, value in self._held.items()},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank needs of each tensor; one tensor is in memory at a time."""
        wanted: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            assert item.type == LoadItemType.TENSOR
            wanted[item.storage_index.fqn].append(item)
        for name, items in wanted.items():
            whole = self._whole(name)
            for item in items:
                bounds = zip(item.storage_offsets, item.lengths, strict=True)
                target = planner.resolve_tensor(item).detach()
                target.copy_(whole[tuple(slice(start, start + length) for start, length in bounds)])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """False: there is no id."""
        return False

    def _whole(self, name: str) -> torch.Tensor:
        if is_adapter(name):
            assert self._draw is not None
            return self._draw(name, tuple(self._held[name].shape))
        first = base_name(name)
        stored = stored_names([first], self._weights, aliases=self._aliases)[first]
        array = self._weights.read(stored[0])
        for other in stored[1:]:
            if not np.array_equal(array, self._weights.read(other)):
                raise CheckpointError(
                    f"{other} differs from {stored[0]}, and the model ties them",
                    hint="set `tie_word_embeddings: false` in the model's config",
                )
        return torch.from_numpy(array)
