"""The rows of models that encode: text, sound, images, and decoders behind an encoder.

Owns which of them exist. Knows nothing of weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from pipeline.models.description import Arrays, ModelKind
from pipeline.models.encoder_inputs import (
    bert_inputs,
    clip_inputs,
    free_image_inputs,
    t5_inputs,
    vit_inputs,
    whisper_inputs,
)
from pipeline.models.encoders.bert import Bert
from pipeline.models.encoders.bert_config import BertConfig
from pipeline.models.encoders.clip import Clip
from pipeline.models.encoders.clip_config import ClipConfig
from pipeline.models.encoders.convnext import Convnext
from pipeline.models.encoders.convnext_config import ConvnextConfig
from pipeline.models.encoders.layers import BatchNorm
from pipeline.models.encoders.resnet import Resnet
from pipeline.models.encoders.resnet_config import ResnetConfig
from pipeline.models.encoders.t5 import T5
from pipeline.models.encoders.t5_config import T5Config
from pipeline.models.encoders.vit import Vit
from pipeline.models.encoders.vit_config import VitConfig
from pipeline.models.encoders.whisper import Whisper
from pipeline.models.encoders.whisper_config import WhisperConfig
from pipeline.models.family import Family


def _forward(module: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The modules take torch's keywords and answer by torch's names."""
    return module(**inputs)


def _evaluated(module: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
    """As `_forward`, with the running statistics even while `module` is being trained."""
    return nnx.view(module, only=BatchNorm, use_running_average=True)(**inputs)


def _row(
    model_type: str,
    *,
    kind: ModelKind | Callable[[Any], ModelKind],
    config: Any,
    module: Callable[..., nnx.Module],
    inputs: Callable[[Any, int], Arrays],
    forward: Callable[[Any, Mapping[str, Any]], dict[str, jax.Array]] = _forward,
) -> Family:
    return Family(
        model_type=model_type,
        kind=(lambda _: kind) if isinstance(kind, ModelKind) else kind,
        config=config,
        module=module,
        example_inputs=inputs,
        forward=forward,
    )


def _t5_kind(config: T5Config) -> ModelKind:
    return ModelKind.SEQ2SEQ_LM if config.has_decoder else ModelKind.TEXT_ENCODER


_BERT: dict[str, Any] = {"kind": ModelKind.TEXT_ENCODER, "config": BertConfig, "module": Bert, "inputs": bert_inputs}
_IMAGE = ModelKind.IMAGE

ENCODERS: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        _row("bert", **_BERT),
        _row("roberta", **_BERT),
        _row("xlm-roberta", **_BERT),
        _row("t5", kind=_t5_kind, config=T5Config, module=T5, inputs=t5_inputs),
        _row("whisper", kind=ModelKind.SPEECH_TO_TEXT, config=WhisperConfig, module=Whisper, inputs=whisper_inputs),
        _row("vit", kind=_IMAGE, config=VitConfig, module=Vit, inputs=vit_inputs),
        _row("clip", kind=ModelKind.IMAGE_TEXT, config=ClipConfig, module=Clip, inputs=clip_inputs),
        _row(
            "resnet",
            kind=_IMAGE,
            config=ResnetConfig,
            module=Resnet,
            inputs=free_image_inputs,
            forward=_evaluated,
        ),
        _row("convnext", kind=_IMAGE, config=ConvnextConfig, module=Convnext, inputs=free_image_inputs),
    )
}
