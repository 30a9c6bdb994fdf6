"""How each decoder family's config is read.

Owns the table from `model_type` to the choices it stands for. Loads no framework. The one decision: a family is a short
function that says only how it differs from Llama; what the module would compute otherwise than transformers is refused
here, when the config is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pipeline.errors import ParameterError, nearest_name
from pipeline.models.decoders.config import DecoderConfig, Experts, Layer, Norm
from pipeline.models.decoders.config_reading import ConfigReading, LayerType
from pipeline.models.decoders.family_defaults import DEFAULTS, EVERYWHERE, RENAMES

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_ZERO_CENTRED = "layernorm_zero_centered_gamma"
"""Megatron's word for gains that are stored minus one, as Gemma's are unless its config says false."""
_FULL: LayerType = "full_attention"
_SLIDING: LayerType = "sliding_attention"
OUTER: Mapping[str, str] = {"gemma3": "gemma3_text"}
"""`model_type` of a model around a language model, with that of the language model."""

_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How transformers' classes end whose outputs are logits of the next token."""


def read_decoder(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a transformers config describes.

    Raises:
        ParameterError: the family is no decoder, a size is missing, or the config asks for something the module does
            not compute; all complaints at once.
    """
    named = [str(name) for name in config.get("architectures") or ()]
    config = text_config(config)
    family = str(config.get("model_type", ""))
    read = READERS.get(family)
    if read is None:
        guess = nearest_name(family, tuple(READERS))
        raise ParameterError(
            f"model config: {family!r} is no decoder; allowed: {', '.join(READERS)}"
            + (f"; did you mean {guess!r}?" if guess else "")
        )
    reading = ConfigReading(config, defaults={**EVERYWHERE, **DEFAULTS[family]}, renames=RENAMES.get(family))
    if named and not named[0].endswith(_LANGUAGE_MODELS):
        reading.complaints.append(
            f"architectures names {named[0]}; the module gives the logits of a language model and has no other head"
        )
    try:
        made = read(reading, family)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ParameterError(f"model config: a value is not of the kind that it must be: {error}") from error
    reading.raise_complaints()
    return made


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model: that inside a Gemma 3 that also sees images, else `config` itself.

    Raises:
        ParameterError: the two configs contradict each other.
    """
    if config.get("model_type") not in OUTER:
        return config
    given = config.get("text_config")
    if not isinstance(given, Mapping):
        raise ParameterError(f"model config: text_config is {given!r}, must be the config of the language model")
    inner = {"model_type": OUTER[config["model_type"]], **given}
    if inner.get("final_logit_softcapping"):
        raise ParameterError(
            "model config: final_logit_softcapping is set in text_config; transformers applies it to the language "
            "model on its own and not inside the model that sees images"
        )
    outside = config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    if outside is None:
        return inner
    if bool(inner.get("tie_word_embeddings", outside)) != bool(outside):
        raise ParameterError("model config: tie_word_embeddings of text_config contradicts the one outside")
    return {**inner, "tie_word_embeddings": outside}


def _like_llama(reading: ConfigReading, family: str, **choices: Any) -> DecoderConfig:
    """Rotary positions, RMS norms, gated feed-forward; `choices` replace what is read here."""
    if "norm" not in choices:
        reading.refuse(**{_ZERO_CENTRED: "this family stores its gains as they are"})
    inner = choices.pop("intermediate_size", None)
    vocabulary, hidden, num_layers, heads, max_positions, *given = reading.sizes(
        *_SIZES, *(("intermediate_size",) if inner is None else ())
    )
    groups = int(reading.value("num_key_value_heads") or heads)
    head_dim = int(reading.value("head_dim") or hidden // heads)
    if not reading.value("head_dim") and hidden % heads:
        reading.complaints.append(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    if groups < 1 or head_dim < 1:
        reading.complaints.append(f"num_key_value_heads is {groups} and head_dim {head_dim}; both must be at least 1")
    elif heads % groups:
        reading.complaints.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}")
    if "layers" not in choices:
        choices["layers"] = _windowed(reading, (_FULL,) * num_layers, window=None)
    found: dict[str, Any] = {
        "norm": Norm(eps=float(reading.value("rms_norm_eps"))),
        "qkv_bias": reading.flag("attention_bias"),
        "output_bias": reading.flag("attention_bias"),
        "tie_word_embeddings": reading.flag("tie_word_embeddings"),
        "initializer_range": float(reading.value("initializer_range")),
    }
    if "activation" not in choices:
        found["activation"] = reading.activation()
    return DecoderConfig(
        family=family,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner or given[0],
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        **{**found, **choices},
    )


def _windowed(
    reading: ConfigReading,
    kinds: tuple[LayerType, ...],
    *,
    window: int | None,
    rope: Mapping[str, Any] | None = None,
) -> tuple[Layer, ...]:
    """Layers that turn alike, some of which see a window; `rope` in place of the config's rope settings."""
    hidden, heads, max_positions = reading.sizes("hidden_size", "num_attention_heads", "max_position_embeddings")
    head_dim = int(reading.value("head_dim") or hidden // heads)
    if window is None and _SLIDING in kinds:
        reading.complaints.append("layer_types has sliding_attention, but sliding_window is not set or not used")
    rotary = reading.rotary(head_dim=head_dim, max_positions=max_positions, settings=rope)
    scale = head_dim**-0.5
    return tuple(Layer(rotary=rotary, scale=scale, window=window if kind == _SLIDING else None) for kind in kinds)


def _alike(reading: ConfigReading, *, window: int | None, rope: Mapping[str, Any] | None = None) -> tuple[Layer, ...]:
    """Every layer sees the same; transformers does not look at `layer_types` for these families."""
    (num_layers,) = reading.sizes("num_hidden_layers")
    kinds = (_SLIDING if window else _FULL,) * num_layers
    if reading.layer_types(kinds) != kinds:
        reading.complaints.append("layer_types differs between layers or from sliding_window; this family has it alike")
    return _windowed(reading, kinds, window=window, rope=rope)


def _llama(reading: ConfigReading, family: str) -> DecoderConfig:
    reading.refuse(
        sliding_window="this family has no attention windows", num_local_experts="this family has no experts"
    )
    return _like_llama(reading, family, mlp_bias=reading.flag("mlp_bias"))


def _mistral(reading: ConfigReading, family: str) -> DecoderConfig:
    return _like_llama(
        reading, family, layers=_alike(reading, window=reading.window()), qkv_bias=False, output_bias=False
    )


def _qwen(reading: ConfigReading, family: str) -> DecoderConfig:
    (num_layers,) = reading.sizes("num_hidden_layers")
    window = reading.window() if reading.flag("use_sliding_window") else None
    first = int(reading.value("max_window_layers"))
    kinds = [_SLIDING if window is not None and index >= first else _FULL for index in range(num_layers)]
    layers = _windowed(reading, reading.layer_types(kinds), window=window)
    if family == "qwen2":
        return _like_llama(reading, family, layers=layers, qkv_bias=True, output_bias=False)
    return _like_llama(reading, family, layers=layers, qk_norm="head")


def _qwen3_moe(reading: ConfigReading, family: str) -> DecoderConfig:
    window = reading.window() if reading.flag("use_sliding_window") else None
    (step,) = reading.sizes("decoder_sparse_step")
    dense = set(reading.value("mlp_only_layers") or ())
    layers = tuple(
        replace(layer, has_experts=index not in dense and (index + 1) % step == 0)
        for index, layer in enumerate(_alike(reading, window=window))
    )
    experts = _experts(reading, size="moe_intermediate_size", normalizes=reading.flag("norm_topk_prob"))
    return _like_llama(reading, family, layers=layers, qk_norm="head", experts=experts)


def _mixtral(reading: ConfigReading, family: str) -> DecoderConfig:
    layers = tuple(replace(layer, has_experts=True) for layer in _alike(reading, window=reading.window()))
    experts = _experts(reading, size="intermediate_size", normalizes=True)
    return _like_llama(reading, family, layers=layers, qkv_bias=False, output_bias=False, experts=experts)


def _experts(reading: ConfigReading, *, size: str, normalizes: bool) -> Experts:
    num, each, inner = reading.sizes("num_experts", "num_experts_per_tok", size)
    if each > num:
        reading.complaints.append(f"num_experts_per_tok is {each}, more than the {num} experts")
    return Experts(num=num, num_per_token=each, intermediate_size=inner, normalizes=normalizes)


def _gemma2(reading: ConfigReading, family: str) -> DecoderConfig:
    (num_layers,) = reading.sizes("num_hidden_layers")
    kinds = reading.layer_types([_FULL if index % 2 else _SLIDING for index in range(num_layers)])
    layers = _rescaled(reading, _windowed(reading, kinds, window=reading.window()))
    return _like_gemma(reading, family, layers=layers, attention_softcap=reading.optional("attn_logit_softcapping"))


def _gemma3(reading: ConfigReading, family: str) -> DecoderConfig:
    reading.refuse(attn_logit_softcapping="transformers does not apply it to this family")
    num_layers, head_dim, max_positions = reading.sizes("num_hidden_layers", "head_dim", "max_position_embeddings")
    pattern = int(reading.value("sliding_window_pattern") or 6)
    kinds = reading.layer_types([_SLIDING if (index + 1) % pattern else _FULL for index in range(num_layers)])
    settings = reading.rope_settings()
    if not {_FULL, _SLIDING} & settings.keys():  # before transformers 5 the scaling was that of full layers alone
        settings = {_FULL: settings, _SLIDING: {}}
    turned = {
        kind: reading.rotary(
            head_dim=head_dim, max_positions=max_positions, settings=settings.get(kind) or {}, theta_key=key
        )
        for kind, key in ((_FULL, "rope_theta"), (_SLIDING, "rope_local_base_freq"))
    }
    window = reading.window()
    layers = tuple(Layer(rotary=turned[kind], scale=1.0, window=window if kind == _SLIDING else None) for kind in kinds)
    return _like_gemma(reading, family, layers=_rescaled(reading, layers), qk_norm="head")


def _rescaled(reading: ConfigReading, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    scale = float(reading.value("query_pre_attn_scalar")) ** -0.5
    return tuple(replace(layer, scale=scale) for layer in layers)


def _like_gemma(reading: ConfigReading, family: str, **choices: Any) -> DecoderConfig:
    reading.refuse(use_bidirectional_attention="attention that looks ahead is not computed")
    (hidden,) = reading.sizes("hidden_size")
    # A file whose gains were shifted by one has the same shapes; only a config that says so can be believed.
    offset = 0.0 if reading.value(_ZERO_CENTRED) is False else 1.0
    return _like_llama(
        reading,
        family,
        norm=Norm(eps=float(reading.value("rms_norm_eps")), offset=offset, scales_in_float32=True),
        norm_places="around",
        activation=reading.activation("hidden_activation"),
        embedding_scale=hidden**0.5,
        logit_softcap=reading.optional("final_logit_softcapping"),
        **choices,
    )


def _phi3(reading: ConfigReading, family: str) -> DecoderConfig:
    settings = reading.rope_settings()
    kind = str(settings.get("rope_type", settings.get("type", "default")))
    if kind in ("su", "yarn"):  # what the first checkpoints called it
        settings["rope_type"] = "longrope"
    elif kind not in ("default", "longrope"):
        reading.complaints.append(f"rope scaling {kind!r} is not one of this family; allowed: default, longrope")
    # The config's own number wins over that of the rope settings (transformers).
    settings["original_max_position_embeddings"] = reading.value("original_max_position_embeddings")
    layers = _alike(reading, window=reading.window(), rope=settings)
    return _like_llama(reading, family, layers=layers, qkv_bias=False, output_bias=False)


def _gpt2(reading: ConfigReading, family: str) -> DecoderConfig:
    reading.refuse(add_cross_attention="attention to another sequence is not computed")
    hidden, num_layers, heads = reading.sizes("hidden_size", "num_hidden_layers", "num_attention_heads")
    scale = (hidden // heads) ** -0.5 if reading.flag("scale_attn_weights") else 1.0
    by_depth = reading.flag("scale_attn_by_inverse_layer_idx")
    return _like_llama(
        reading,
        family,
        intermediate_size=int(reading.value("intermediate_size") or 4 * hidden),
        layers=tuple(
            Layer(rotary=None, scale=scale / (index + 1) if by_depth else scale) for index in range(num_layers)
        ),
        norm=Norm(kind="layer", eps=float(reading.value("norm_eps"))),
        learns_positions=True,
        is_gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def _gpt_neox(reading: ConfigReading, family: str) -> DecoderConfig:
    return _like_llama(
        reading,
        family,
        norm=Norm(kind="layer", eps=float(reading.value("norm_eps"))),
        is_parallel=reading.flag("use_parallel_residual"),
        is_gated=False,
        mlp_bias=True,
    )


def _olmo2(reading: ConfigReading, family: str) -> DecoderConfig:
    return _like_llama(
        reading,
        family,
        norm=Norm(eps=float(reading.value("rms_norm_eps")), scales_in_float32=True),
        norm_places="after",
        qk_norm="full",
        rotates_in_float32=True,
    )


READERS: Mapping[str, Callable[[ConfigReading, str], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "olmo2": _olmo2,
}
