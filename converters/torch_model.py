"""The transformers model of a checkpoint, for comparison.

Owns the loading of weights into the torch module without the conversion rules: transformers' own loader renames, ties
and fills, so a fault in a rule cannot hide on both sides of a comparison. Knows nothing of Flax. The one decision: the
reference runs in float32 with the plain attention formula.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from converters.operations import FLOAT_DTYPES, Array
from converters.readers import open_source
from converters.source import CheckpointSource
from converters.wrappers import canonical_names
from pipeline.errors import ConversionError
from pipeline.models.encoders.config_fields import POOLER_KEY


def load_torch_model(checkpoint: Path, *, rounding: Mapping[str, str] | None = None) -> PreTrainedModel:
    """The torch model of the checkpoint directory, float32 on the CPU, in evaluation mode.

    Its class is the one that `architectures` names.

    Args:
        checkpoint: what `open_source` reads.
        rounding: a dtype by stored name, or by the name without wrappers; such a weight is rounded to it before it is
            widened again.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: `config.json` is missing or unreadable.
        ConversionError: `architectures` names no transformers model, or the tensors are not those of the model that the
            config describes; lists every complaint.
    """
    source = open_source(checkpoint)
    config = source.config()
    parsed = AutoConfig.for_model(**config)
    kind = model_class(config)
    with _quiet():
        model, report = kind.from_pretrained(
            None,
            config=parsed,
            state_dict=_state(source, rounding=rounding or {}),
            dtype=torch.float32,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **class_arguments(kind, config),
        )
    complaints = [
        f"  {name}: checkpoint has shape {tuple(found)}, torch model {tuple(wanted)}"
        for name, found, wanted in report["mismatched_keys"]
    ]
    complaints += [f"  {name}: the torch model needs it, the checkpoint lacks it" for name in report["missing_keys"]]
    complaints += [f"  {line}" for line in report.get("error_msgs", ())]
    if complaints:
        raise ConversionError(f"{checkpoint}: does not fill the torch model:\n" + "\n".join(sorted(complaints)))
    return model.eval()


def model_class(config: Mapping[str, Any]) -> type[PreTrainedModel]:
    """The transformers class that a config's `architectures` names; where it names none, the causal language model.

    Raises:
        ConversionError: it names something that is no model of transformers.
    """
    names = config.get("architectures") or ()
    if not names:
        known = {kind.model_type: model for kind, model in AutoModelForCausalLM._model_mapping.items()}
        found = known.get(config.get("model_type"))
    else:
        found = getattr(transformers, str(names[0]), None)
    if not (inspect.isclass(found) and issubclass(found, PreTrainedModel)):
        raise ConversionError(
            f"config.json: architectures is {list(names)!r}; its first name must be a model class of transformers",
            hint='save the model with `save_pretrained`, or write for example "architectures": ["LlamaForCausalLM"]',
        )
    return found


def class_arguments(kind: type[PreTrainedModel], config: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` says that the class takes as arguments of its own and not in its config."""
    takes_it = POOLER_KEY in inspect.signature(kind.__init__).parameters
    return {POOLER_KEY: bool(config[POOLER_KEY])} if takes_it and POOLER_KEY in config else {}


def _state(source: CheckpointSource, *, rounding: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Every tensor by the name that its checkpoint gives it; weights in float32, counters as they are."""
    return {
        name: _tensor(source.read(stored), rounded_to=rounding.get(stored, rounding.get(name)))
        for name, stored in canonical_names(source.headers).items()
    }


def _tensor(array: Array, *, rounded_to: str | None) -> torch.Tensor:
    if array.dtype.kind in "iub":
        return torch.from_numpy(array)
    narrow = array if rounded_to is None else array.astype(FLOAT_DTYPES[rounded_to])
    return torch.from_numpy(narrow.astype(FLOAT_DTYPES["float32"]))  # torch cannot take numpy's bfloat16


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bar, which would be drawn into the caller's."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
