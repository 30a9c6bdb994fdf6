"""The torch module of a checkpoint, made for tracing.

Owns where the module comes from (`module.json` of the user's own, or a transformers `config.json`) and its inputs.
Knows nothing of weights: they are neither read nor initialised. The one decision: a transformers model is traced with
eager attention, without a cache and with experts as batched products, because only these forms are the same graph for
every input.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from converters.torch_model import class_arguments, model_class
from converters.trace.examples import Examples, module_examples, transformers_examples
from pipeline.errors import ArtifactError, ConversionError
from pipeline.models.config_file import CONFIG_FILE, read_config
from pipeline.models.module_file import MODULE_FILE, ModuleFile
from pipeline.training.tasks.module_factory import build_module

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TraceableModel:
    """A torch module with example inputs."""

    module: torch.nn.Module
    """In evaluation mode; its parameters hold nothing of the checkpoint."""
    examples: Examples


def traceable_model(
    directory: Path, *, dtypes: Sequence[str] = ("float32",), project_root: Path | None = None
) -> TraceableModel:
    """The module that the checkpoint in `directory` was saved from.

    Args:
        directory: with `module.json` or `config.json`.
        dtypes: of the leaves; the most frequent float is the dtype of the module.
        project_root: where the factory of `module.json` is looked for first; the working directory by default.

    Raises:
        ArtifactError: neither file is there, or it is malformed.
        ParameterError: the factory cannot be imported or gives no module.
        ConversionError: transformers has no such model, or no example inputs can be derived for it.
    """
    counted = Counter(name for name in dtypes if name in _FLOATS).most_common(1)
    dtype = _FLOATS[counted[0][0]] if counted else torch.float32
    if (directory / MODULE_FILE).is_file():
        described = ModuleFile.read(directory)
        module = build_module(
            described.factory,
            arguments=described.arguments,
            project_root=str(project_root or Path.cwd()),
            seed=0,
        )
        return TraceableModel(module=module.to(dtype).eval(), examples=module_examples(described, dtype=dtype))
    if not (directory / CONFIG_FILE).is_file():
        raise ArtifactError(
            f"{directory}: neither {MODULE_FILE} nor {CONFIG_FILE} is there",
            hint="tracing needs the module: its factory in module.json, or a transformers config",
        )
    module = transformers_module(read_config(directory), dtype=dtype)
    return TraceableModel(module=module, examples=transformers_examples(module, dtype=dtype))


def transformers_module(config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The class that the config names first under `architectures`, uninitialised, in evaluation mode.

    Raises:
        ConversionError: transformers has no such model, or its class refuses the config.
    """
    kind = model_class(config)
    try:
        parsed = AutoConfig.for_model(**dict(config))
        prepare(parsed)
        with no_init_weights():
            module = kind._from_config(parsed, dtype=dtype, **class_arguments(kind, config))
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise ConversionError(f"{CONFIG_FILE}: transformers cannot build {kind.__name__}: {error}") from error
    module.tie_weights()
    return module.eval()


def prepare(config: Any) -> None:
    """Set what makes a transformers model one graph for every input, in its config and those inside it."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if part is None:
            continue
        part._attn_implementation = "eager"
        part._experts_implementation = "batched_mm"
        part.use_cache = False
        part.return_dict = True
