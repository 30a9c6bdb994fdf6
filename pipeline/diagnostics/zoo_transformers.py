"""Tiny random models of every architecture of transformers.

Owns which class stands for a model type and how it is built: small, random in every parameter, in evaluation mode,
with the plain attention formula and no cache. Knows nothing of tracing. The one decision: a model counts as built when
its own forward pass gives finite outputs, so that every later failure is about tracing and not about a bad config.
"""

from collections.abc import Iterator, Mapping

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from pipeline.diagnostics.trace_zoo import BuildError, ZooModel
from pipeline.diagnostics.zoo_configs import LEVELS, Shrink, parts
from pipeline.diagnostics.zoo_inputs import Inputs, candidates, place_tokens
from pipeline.diagnostics.zoo_overrides import HEAD_OVERRIDES, HEADS
from pipeline.diagnostics.zoo_random import randomize

_TABLES = sorted(name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES") and name.startswith("MODEL_"))
_MAX_COMPLAINTS = 3
"""Answered for one set of inputs: image, video and audio tokens."""
_MAX_PARAMETERS = 60_000_000


def names() -> Iterator[tuple[str, str]]:
    """Name and group of every architecture: a model type, or `model type:class` for a head of its own."""
    for model_type in sorted({*modeling_auto.MODEL_MAPPING_NAMES, *_headed()}):
        yield model_type, "transformers"
    for model_type, classes in sorted(HEADS.items()):
        for name in classes:
            yield f"{model_type}:{name}", "transformers heads"


def _headed() -> dict[str, str]:
    """Model type -> class, for types that have no model without a head."""
    found: dict[str, str] = {}
    for table in _TABLES:
        for model_type, name in getattr(modeling_auto, table).items():
            if model_type not in modeling_auto.MODEL_MAPPING_NAMES:
                found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return found


def model_class(name: str) -> type[PreTrainedModel]:
    """The class that `name` of `names` stands for."""
    model_type, _, wanted = name.partition(":")
    found = wanted or modeling_auto.MODEL_MAPPING_NAMES.get(model_type) or _headed()[model_type]
    first = found if isinstance(found, str) else found[0]
    return getattr(transformers, first)


def build(name: str) -> ZooModel:
    """Build the model and inputs that it accepts.

    Raises:
        BuildError: no way of making it small gives a model that runs; says why the first did not.
    """
    complaints: list[str] = []
    for shrink in LEVELS:
        try:
            return _build(name, shrink=shrink)
        except (Exception, SystemExit) as error:  # an architecture may raise anything
            complaints.append(f"{type(error).__name__}: {error}")
    raise BuildError(complaints[0])


def _build(name: str, *, shrink: Shrink) -> ZooModel:
    config = shrink.config(CONFIG_MAPPING[name.partition(":")[0]], **HEAD_OVERRIDES.get(name, {}))
    for part in parts(config):
        part.use_cache = False
    chosen = model_class(name)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in chosen(config).parameters())
    if size > _MAX_PARAMETERS:
        raise BuildError(f"{size:,} parameters at its smallest")
    torch.manual_seed(0)
    model = chosen._from_config(config, attn_implementation="eager", **_experts(chosen))
    model = model.float().eval()
    randomize(model)
    return ZooModel(module=model, inputs=_working_inputs(model))


def _experts(chosen: type[PreTrainedModel]) -> Mapping[str, str]:
    """Experts as one batched product: the loop over those that were hit cannot be exported."""
    return {"experts_implementation": "batched_mm"} if chosen._can_set_experts_implementation() else {}


def _working_inputs(model: PreTrainedModel) -> Inputs:
    """The fullest inputs that the model's own forward pass takes."""
    first: Exception | None = None
    for inputs in candidates(model):
        tried: Inputs | None = inputs
        for _ in range(_MAX_COMPLAINTS):
            if tried is None:
                break
            try:
                with torch.no_grad():
                    model(**tried)
            except Exception as error:  # an architecture may raise anything
                first = first or error
                tried = place_tokens(tried, model=model, complaint=str(error))
            else:
                return tried
    raise first or LookupError("no inputs")
