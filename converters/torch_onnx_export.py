"""A torch model to ONNX, for runtimes that know neither torch nor jax.

Owns how the model is exported: from which weights, with which sizes open, at which opset. Knows nothing of onnxruntime.
The one decision: the ONNX model is made from the torch model, not from Flax, because that is the path that the format's
own tools support; a Flax model first becomes a torch checkpoint again, bit for bit.
"""

import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

from converters import safetensors_export
from converters.export_record import ExportOptions, ExportRecord, files_of
from converters.flax_source import FlaxSource
from converters.readers import open_source
from converters.torch_model import load_torch_model
from converters.torch_onnx_check import check_onnx, quantize, tensors_of
from converters.torch_own_module import load_own_module
from converters.trace.examples import Examples, module_examples, transformers_examples
from converters.trace.model import prepare
from pipeline.errors import ConversionError
from pipeline.models.module_file import MODULE_FILE, ModuleFile

MODEL_FILE = "model.onnx"
INT8_FILE = "model.int8.onnx"
RECORD_FILE = "export.json"
_EXTERNAL_BYTES = 1_500_000_000
"""Weights beyond this lie in a file beside the graph; an ONNX file itself holds 2 GB at most."""


@dataclass(frozen=True, kw_only=True)
class _TorchModel:
    module: torch.nn.Module
    """float32, evaluation mode."""
    examples: Examples
    source_format: str
    num_tensors: int


def write(source: Path, directory: Path, options: ExportOptions) -> ExportRecord:
    """Write the model in `source` into `directory`; see `converters.exporting.export`.

    Raises:
        ConversionError: torch cannot export it, or what was exported computes something else.
    """
    if options.dtype == "bfloat16":
        raise ConversionError(
            "format onnx: dtype bfloat16 is not written: onnxruntime's CPU kernels do not compute in it",
            hint="allowed: keep (written in float32) and float32; --int8 makes the model smaller",
        )
    with _torch_model(source, options) as model:
        program, names = _exported(model, opset=options.opset)
        is_external = sum(p.numel() * 4 for p in model.module.parameters()) > _EXTERNAL_BYTES
        program.save(directory / MODEL_FILE, external_data=is_external)
        measured = check_onnx(directory / MODEL_FILE, module=model.module, examples=model.examples, outputs=names)
        metrics = dict(measured.metrics)
        if options.int8:
            quantize(directory / MODEL_FILE, to=directory / INT8_FILE)
            found = check_onnx(
                directory / INT8_FILE, module=model.module, examples=model.examples, outputs=names, is_rounded=True
            )
            metrics |= {f"int8_{name}": value for name, value in found.metrics.items()}
        facts = {
            "opset": {entry.domain or "ai.onnx": entry.version for entry in program.model_proto.opset_import},
            "inputs": measured.inputs,
            "outputs": measured.outputs,
            "dtype": "float32",
            "checked_sizes": measured.sizes,
        }
        record = ExportRecord(
            format="onnx",
            source_format=model.source_format,
            dtype_policy=options.dtype,
            files=(),
            num_tensors=model.num_tensors,
            num_bytes=0,
            facts=facts,
            metrics=metrics,
        )
    return _recorded(record, directory)


def _recorded(record: ExportRecord, directory: Path) -> ExportRecord:
    files, num_bytes = files_of(directory)
    record = replace(record, files=(*files, RECORD_FILE), num_bytes=num_bytes)
    text = json.dumps(asdict(record), indent=1, sort_keys=True)
    (directory / RECORD_FILE).write_text(text + "\n", encoding="utf-8")
    return record


@contextmanager
def _torch_model(source: Path, options: ExportOptions) -> Iterator[_TorchModel]:
    """The torch model of a checkpoint, or of a Flax model that becomes one for as long as it is needed."""
    if FlaxSource.recognises(source):
        with tempfile.TemporaryDirectory(prefix="exporting-") as temporary:
            safetensors_export.write(source, Path(temporary), replace(options, dtype="keep"))
            yield replace(_loaded(Path(temporary), options), source_format=FlaxSource.format)
    else:
        yield _loaded(source, options)


def _loaded(checkpoint: Path, options: ExportOptions) -> _TorchModel:
    source = open_source(checkpoint)
    if (source.directory / MODULE_FILE).is_file():
        module = load_own_module(checkpoint, project_root=options.project_root or Path.cwd())
        examples = module_examples(ModuleFile.read(source.directory), dtype=torch.float32)
    else:
        module = load_torch_model(checkpoint)
        prepare(module.config)
        examples = transformers_examples(module, dtype=torch.float32)
    return _TorchModel(module=module, examples=examples, source_format=source.format, num_tensors=len(source.headers))


def _exported(model: _TorchModel, *, opset: int | None) -> tuple[Any, tuple[str, ...]]:
    """The ONNX program and the names of its outputs.

    Raises:
        ConversionError: torch refuses; its own words are in the message.
    """
    inputs = model.examples.inputs
    with torch.no_grad():
        names = tuple(tensors_of(model.module(**inputs)))
    wrapped = _Flat(model.module, inputs=tuple(inputs))
    shapes = tuple(dict.fromkeys(model.examples.dynamic.get(name, ()), Dim.AUTO) or None for name in inputs)
    try:
        with torch.no_grad(), _quiet():
            program = torch.onnx.export(
                torch.export.export(wrapped, tuple(inputs.values()), dynamic_shapes=(shapes,), strict=False),
                dynamo=True,
                verbose=False,
                opset_version=opset,
                input_names=list(inputs),
                output_names=list(names),
            )
    except Exception as error:  # the exporter raises whatever a translation or the module's own code raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConversionError(
            f"{type(model.module).__name__}: torch cannot export it to ONNX: {type(error).__name__}: "
            + " ".join(lines[:4])[:600],
            hint="see torch.onnx.export's documentation for what a module may do",
        ) from error
    _name_sizes(program, model.examples)
    return program, names


def _name_sizes(program: Any, examples: Examples) -> None:
    """Give open sizes the names that the examples have for them, instead of torch's symbols."""
    renamed: dict[str, str] = {}
    for value in program.model.graph.inputs:
        for axis, name in examples.dynamic.get(value.name, {}).items():
            symbol = value.shape[axis]
            if not isinstance(symbol, int):
                renamed.setdefault(str(symbol.value), name)
    if renamed:
        program.rename_axes(renamed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's words on packages that are not installed and on its own deprecated calls."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


class _Flat(torch.nn.Module):
    """Takes its inputs by position and gives its tensors as a tuple."""

    def __init__(self, module: torch.nn.Module, *, inputs: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._inputs = inputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The module's tensors in the order of their names."""
        return tuple(tensors_of(self.module(**dict(zip(self._inputs, tensors, strict=True)))).values())
