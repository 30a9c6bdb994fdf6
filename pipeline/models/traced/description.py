"""What a model directory with `program.json` describes.

Owns the description of a traced model: kind, example inputs, outputs by name. Knows nothing of torch. The one decision:
everything is read from the program itself; `config.json`, where there is one, only says what the model is for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.models.config_file import CONFIG_FILE, read_config
from pipeline.models.description import Arrays, ModelKind
from pipeline.models.traced.dtypes import DTYPES
from pipeline.models.traced.interpreter import Interpreter
from pipeline.models.traced.module import TracedModule, interpreter_and_constants
from pipeline.models.traced.program import Input, Program, substituted
from pipeline.models.traced.program_file import read_program

_BATCH_SIZE = 3
_OPEN_SIZES = (11, 7, 13, 5, 17, 10)
"""Example sizes of the other open dimensions, in their order; none is a power of two or the batch's."""
SINGLE_OUTPUT = "output"
"""The name of an output that torch returns bare."""


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """The `ModelDescription` of a traced program."""

    program: Program
    constants: Mapping[str, np.ndarray[Any, Any]]
    config: Mapping[str, Any] = field(default_factory=dict)
    """The transformers config it was traced from, or empty."""

    @classmethod
    def read(cls, directory: Path) -> "TracedModel":
        """Of a model directory.

        Raises:
            ArtifactError: a file is missing or malformed.
        """
        program, constants = read_program(directory)
        config = read_config(directory) if (directory / CONFIG_FILE).is_file() else {}
        return cls(program=program, constants=constants, config=config)

    @property
    def kind(self) -> ModelKind:
        """What it is for, by what goes into it and by its class's name."""
        if not self.config:
            return ModelKind.PREDICTOR
        return _kind(self.program.name, frozenset(self.program.inputs))

    @property
    def name(self) -> str:
        """Every traced model has the one name."""
        return "traced"

    @cached_property
    def _parts(self) -> tuple[Interpreter, dict[str, jax.Array]]:
        return interpreter_and_constants(self.program, self.constants)

    def abstract(self) -> TracedModule:
        """The module without weights; its constants are real."""
        interpreter, constants = self._parts
        leaves = {
            name: jax.ShapeDtypeStruct(leaf.shape, DTYPES[leaf.dtype]) for name, leaf in self.program.leaves.items()
        }
        return TracedModule(interpreter, leaves=leaves, constants=constants)

    def module(self, leaves: Mapping[str, Any], *, rngs: nnx.Rngs | None = None) -> TracedModule:
        """The module with these leaves, by torch name."""
        interpreter, constants = self._parts
        arrays = {name: jnp.asarray(leaves[name]) for name in self.program.leaves}
        return TracedModule(interpreter, leaves=arrays, constants=constants, rngs=rngs)

    def example_inputs(self, *, seed: int) -> Arrays:
        """Random inputs by path, of open sizes that differ from each other."""
        random = np.random.default_rng(seed)
        sizes = self._sizes()
        return {
            name: _example(name, spec, tuple(sizes[s] if isinstance(s, str) else s for s in spec.shape), random)
            for name, spec in self.program.inputs.items()
        }

    def forward(self, module: nnx.Module, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Run `module` on inputs by path; every tensor of the output by its path."""
        given = substituted(dict(self.program.arguments), inputs)
        outputs: dict[str, jax.Array] = {}
        _flatten(module(**given), "", outputs)
        return outputs

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        for number, (name, limits) in enumerate(self.program.dimensions.items()):
            wanted = _BATCH_SIZE if number == 0 else _OPEN_SIZES[(number - 1) % len(_OPEN_SIZES)]
            sizes[name] = max(limits.low, wanted if limits.high is None else min(wanted, limits.high))
        return sizes


def _example(name: str, spec: Input, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray[Any, Any]:
    dtype = jnp.dtype(DTYPES[spec.dtype])
    if jnp.issubdtype(dtype, jnp.floating):
        return random.standard_normal(shape).astype(np.float32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (random.standard_normal(shape) + 1j * random.standard_normal(shape)).astype(np.complex64)
    if "mask" in name.rpartition(".")[2] and len(shape) == 2:
        # Row r ends r places early: rows of several lengths, padded on the right, none empty.
        lengths = np.maximum(shape[1] - np.arange(shape[0]), 1)
        return (np.arange(shape[1]) < lengths[:, None]).astype(bool if dtype == jnp.bool_ else np.int32)
    drawn = random.integers(spec.low, spec.high, shape)
    return drawn.astype(bool if dtype == jnp.bool_ else np.int32)


def _flatten(value: Any, path: str, outputs: dict[str, jax.Array]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(item, f"{path}.{key}" if path else str(key), outputs)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _flatten(item, f"{path}.{number}" if path else f"{SINGLE_OUTPUT}_{number}", outputs)
    elif isinstance(value, jax.Array | np.ndarray):
        outputs[path or SINGLE_OUTPUT] = jnp.asarray(value)


def _kind(name: str, inputs: frozenset[str]) -> ModelKind:
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return ModelKind.CAUSAL_LM
    has_sound = bool(inputs & {"input_features", "input_values"})
    if "decoder_input_ids" in inputs:
        return ModelKind.SPEECH_TO_TEXT if has_sound else ModelKind.SEQ2SEQ_LM
    if {"input_ids", "pixel_values"} <= inputs:
        return ModelKind.IMAGE_TEXT
    if "input_ids" in inputs:
        return ModelKind.TEXT_ENCODER
    return ModelKind.IMAGE if "pixel_values" in inputs else ModelKind.PREDICTOR
