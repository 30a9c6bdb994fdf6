"""The devices that compute one copy of a model, and how its arrays lie on them.

Owns the shardings of parameters, cache, inputs and results. Knows nothing of requests. The one decision: the compiler
divides the computation (`jax.jit` over named shardings): parameters and cache are laid down by the rules of
`pipeline.models.decoders.partition`, everything else is whole on every device, and the functions that are traced are
the same for one device and for many.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from pipeline.errors import ParameterError
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.layout import decoder_layout, is_decoder
from pipeline.models.decoders.model import Cache, empty_cache
from pipeline.models.decoders.partition import TENSOR, MeshSize, cache_axes, leaf_axes
from pipeline.models.description import ModelDescription
from pipeline.models.family import FamilyModel
from pipeline.models.placement import Layout


@dataclass(frozen=True, kw_only=True)
class ServingMesh:
    """One or several devices, in the order of the tensor axis."""

    devices: tuple[Any, ...]
    _mesh: Mesh | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        many = len(self.devices) > 1
        object.__setattr__(self, "_mesh", Mesh(np.array(self.devices), (TENSOR,)) if many else None)

    @classmethod
    def of(cls, *devices: Any) -> "ServingMesh":
        """A mesh of these devices."""
        return cls(devices=devices)

    @classmethod
    def groups(cls, size: MeshSize, *, device: Any) -> "tuple[ServingMesh, ...]":
        """One mesh for each copy of the model, of devices like `device`, from those of this process or of all hosts.

        Raises:
            ParameterError: there are too few devices.
        """
        found = [
            one for one in jax.devices(device.platform) if size.hosts > 1 or one.process_index == jax.process_index()
        ]
        if size.num_devices == 1:
            return (cls.of(device),)
        if len(found) < size.num_devices:
            raise ParameterError(
                f"mesh: tensor {size.tensor} x data {size.data} needs {size.num_devices} devices, but jax sees "
                f"{len(found)} ({device.device_kind}) on {size.hosts} host(s)",
                hint=f"give the stage as many GPUs (resources: gpus: {size.devices_per_host}), or a smaller mesh",
            )
        return tuple(cls.of(*found[at : at + size.tensor]) for at in range(0, size.num_devices, size.tensor))

    @property
    def tensor(self) -> int:
        """Over how many devices the model lies."""
        return len(self.devices)

    @property
    def own_device(self) -> Any:
        """The first that this process holds."""
        return next(device for device in self.devices if device.process_index == jax.process_index())

    @property
    def platform(self) -> str:
        """`cpu`, `gpu`, ..."""
        return str(self.devices[0].platform)

    @property
    def whole(self) -> Sharding:
        """Of an array that every device holds."""
        return self._sharding(())

    def leaf(self, path: str, shape: Sequence[int], *, config: DecoderConfig) -> Sharding:
        """Of the parameter at a dotted path; `config` is that of the model as it is placed."""
        return self._sharding(leaf_axes(path, shape, config=config, tensor=self.tensor))

    def layout(self, description: ModelDescription) -> Layout | None:
        """For `pipeline.models.checkpoint.load_model`; None on one device.

        Raises:
            ParameterError: a model of this kind is not divided.
        """
        if self._mesh is None:
            return None
        if not isinstance(description, FamilyModel) or not is_decoder(description):
            raise ParameterError(
                f"mesh.tensor is {self.tensor}, but only decoders of a family are divided over devices; this is a "
                f"{description.kind.value} model ({description.name})",
                hint="leave `mesh` out and use `replicas` for more throughput",
            )
        return decoder_layout(description, sharding=self.leaf, tensor=self.tensor)

    @property
    def cache(self) -> Sharding:
        """Of keys and of values."""
        return self._sharding(cache_axes(tensor=self.tensor))

    def empty_cache(self, config: DecoderConfig, *, slots: int, positions: int, dtype: Any) -> Cache:
        """Zeros, made where they lie; see `pipeline.models.decoders.model.empty_cache`."""
        return jax.jit(
            lambda: empty_cache(config, slots=slots, positions=positions, dtype=dtype), out_shardings=self.cache
        )()

    def zeros(self, *shape: int) -> jax.Array:
        """float32, the same on every device."""
        # Not `device_put`: with several hosts it would first compare what they give.
        return jax.make_array_from_callback(shape, self.whole, lambda _: np.zeros(shape, np.float32))

    def on_every_device(self, array: jax.Array) -> jax.Array:
        """Inside a traced function: gather what is divided."""
        return array if self._mesh is None else jax.lax.with_sharding_constraint(array, self.whole)

    def settled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the last of its results, the cache, laid out as it was given, the others whole.

        Without it the compiler is free to choose, and a cache that comes back otherwise cannot be donated again.
        """
        if self._mesh is None:
            return function

        def settled(*given: Any) -> Any:
            *results, cache = function(*given)
            return *map(self.on_every_device, results), jax.lax.with_sharding_constraint(cache, self.cache)

        return settled

    def _sharding(self, axes: Sequence[str | None]) -> Sharding:
        if self._mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self._mesh, PartitionSpec(*axes))
