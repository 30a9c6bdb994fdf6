"""Tiny configs of transformers' architectures.

Owns how the config of any model type is made small: which fields are widths, depths, counts and ids, by the names the
field gives them. Knows no single architecture; those that need more are rows in `zoo_overrides`. The one decision: a
config is shrunk by field name, so an architecture that nobody has looked at is still built, and what its config
derives from other fields is derived again from the small ones.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from pipeline.diagnostics.zoo_overrides import OVERRIDES, REQUIRED_SUB_CONFIGS

VOCABULARY = 101
WIDTH = 64
NUM_HEADS = 4
HEAD_DIM = 16
NUM_LAYERS = 2
IMAGE_SIZE = 32
PATCH_SIZE = 8
POSITIONS = 64
_SMALLEST_LIST_WIDTH = 16

EXACT: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "emb_dim"), WIDTH),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "out_hidden_size", "text_hidden_size"), WIDTH),
    **dict.fromkeys(("projector_hidden_size", "projection_hidden_size", "fpn_hidden_size", "mask_dim"), WIDTH),
    **dict.fromkeys(("encoder_hidden_dim", "decoder_hidden_dim", "fusion_hidden_size", "lm_hidden_size"), WIDTH),
    **dict.fromkeys(("mask_feature_size", "vision_hidden_size", "image_text_hidden_size"), WIDTH),
    **dict.fromkeys(("embedding_size", "projection_dim", "classifier_proj_size", "d_embed", "embedding_dim"), 16),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "encoder_num_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("decoder_num_attention_heads", "attention_heads", "num_self_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("num_cross_attention_heads", "decoder_self_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("decoder_cross_attention_heads", "swa_num_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("speech_encoder_attention_heads", "t2u_encoder_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("t2u_decoder_attention_heads", "decoder_num_heads", "index_n_heads"), NUM_HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "attention_num_heads"), 2),
    **dict.fromkeys(("encoder_num_key_value_heads", "decoder_num_key_value_heads"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "dim_head", "attention_head_size", "kv_channels"), HEAD_DIM),
    **dict.fromkeys(("qk_rope_head_dim", "swa_head_dim", "linear_key_head_dim", "v_head_dim"), HEAD_DIM),
    **dict.fromkeys(("linear_value_head_dim", "linear_head_dim", "global_head_dim", "index_head_dim"), HEAD_DIM),
    "qk_nope_head_dim": 12,
    **dict.fromkeys(("rotary_dim", "swa_rope_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "o_lora_rank", "laurel_rank", "gated_norm_rank"), 16),
    **dict.fromkeys(("q_lora_rank", "loop_gate_rank", "embedding_rank", "hc_lowrank"), 12),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"), NUM_LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), NUM_LAYERS),
    **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), NUM_LAYERS),
    **dict.fromkeys(("speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers"), NUM_LAYERS),
    **dict.fromkeys(
        ("decoder_num_layers", "text_encoder_num_layers", "num_layer", "conf_num_hidden_layers"), NUM_LAYERS
    ),
    **dict.fromkeys(("l_layers", "x_layers", "r_layers", "num_self_attends_per_block"), NUM_LAYERS),
    **dict.fromkeys(("num_spatial_layers", "num_temporal_layers", "num_auxiliary_layers"), NUM_LAYERS),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner", "dff"), 48),
    **dict.fromkeys(("ffn_dim", "dim_ff", "dim_feedforward", "encoder_feedforward_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "intermediate_size_mlp", "dense_intermediate_size"), 48),
    **dict.fromkeys(("feed_forward_size", "decoder_intermediate_size", "speech_encoder_intermediate_size"), 48),
    **dict.fromkeys(("encoder_linear_units", "decoder_linear_units", "inner_dim", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "moe_hidden_size"), 24),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), 2),
    **dict.fromkeys(("zero_expert_num", "index_topk_blocks", "index_kpool"), 4),
    # More keys than there are tokens: an indexer scores many 0, and torch does not say which of equals it takes.
    "index_topk": 16,
    "mm_tokens_per_image": 4,
    "n_group": 2,
    "topk_group": 1,
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("text_encoder_vocab_size", "entity_vocab_size", "pronunciation_vocab_size"), VOCABULARY),
    **dict.fromkeys(
        ("shape_vocab_size", "t2u_vocab_size", "char_vocab_size", "vocab_size_per_layer_input"), VOCABULARY
    ),
    **dict.fromkeys(("unit_hifi_gan_vocab_size", "codebook_vocab_size", "original_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_seq_length"), POSITIONS),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "max_text_positions"), POSITIONS),
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), POSITIONS),
    **dict.fromkeys(("original_max_position_embeddings", "max_2d_position_embeddings"), POSITIONS),
    **dict.fromkeys(("max_speech_positions", "t2u_max_position_embeddings", "max_sequence_length"), POSITIONS),
    **dict.fromkeys(("image_size", "input_size", "img_size", "pretrain_image_size", "crop_size"), IMAGE_SIZE),
    **dict.fromkeys(("max_image_size", "max_img_size", "min_image_size"), IMAGE_SIZE),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "local_attention", "attention_window_size"), 4),
    **dict.fromkeys(("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel"), 16),
    **dict.fromkeys(("num_conv_pos_embeddings", "num_query_tokens", "num_latents", "latent_query_num"), 8),
    **dict.fromkeys(("resampler_num_latents", "perceiver_resampler_num_latents"), 8),
    **dict.fromkeys(("num_conv_pos_embedding_groups", "upsample_groups"), 4),
    **dict.fromkeys(("num_queries", "two_stage_num_proposals", "num_denoising"), 10),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_state_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 2 * NUM_HEADS),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), HEAD_DIM),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 4),
    **dict.fromkeys(("codebook_size", "num_codevectors_per_group", "num_embeddings"), 16),
    **dict.fromkeys(("codebook_dim", "codevector_dim", "proj_codevector_dim", "latent_dim"), 16),
    **dict.fromkeys(("num_filters", "upsample_initial_channel"), 16),
    "num_frames": 2,
}
"""Field -> its small value, where the field is a number larger than that."""

_WIDTH_LISTS = re.compile(r"(sizes|dims|channels|dim|units|in_channels|out_channels|feat_dims)$")
_NOT_WIDTHS = re.compile(
    r"kernel|patch|window|stride|dilation|pool|scale|ratio|factor|padding|featmap|levels|vocab|stem"
)
_DEPTH_LISTS = re.compile(r"(depths|num_layers|block_repeats|stage_num_blocks|layer_numbers|numb_of_layers)$")
_LAYER_LISTS = re.compile(r"(indices|indexes|hook_ids|extract_layers|attn_indexes|layer_ids)$")
_GUESSED_WIDTH = re.compile(r"(_dim|_size|_channels|_width|_hidden|_units|_features|hidden|width)$")
_GUESS_LEAST = 64
_TOKEN_ID = re.compile(r"(_token_id|_token_ids|_token_index|_token_idx|_pad_id|^(im|pad|bos|eos|unk)\w*_(id|index))$")


class Shrink:
    """One way to make configs small.

    Args:
        guess: also shrink fields that only look like widths.
        widths: shrink widths and heads; without, only layers, tokens, images and the other rows of `EXACT`.
    """

    def __init__(self, *, guess: bool, widths: bool) -> None:
        self.guess = guess
        self.widths = widths

    def config(self, config_class: type[PreTrainedConfig], **fields: Any) -> PreTrainedConfig:
        """A small config of the class, with these fields as they are."""
        model_type = config_class.model_type
        sub_configs = {name: CONFIG_MAPPING[kind]() for name, kind in REQUIRED_SUB_CONFIGS.get(model_type, {}).items()}
        default = config_class(**sub_configs)
        config = config_class(**{**self._arguments(default), **fields})
        for part in parts(config):
            fit_rope_sections(part)
        spread_token_ids(config)
        return config

    def _arguments(self, default: PreTrainedConfig) -> dict[str, Any]:
        """Keyword arguments of a small config like `default`."""
        arguments: dict[str, Any] = {}
        for field in dataclasses.fields(default):
            value = vars(default).get(field.name)  # what differs from layer to layer refuses getattr
            if isinstance(value, PreTrainedConfig):
                arguments[field.name] = type(value)(**self._arguments(value))
            elif field.default is not None and not (field.default is dataclasses.MISSING and value is None):
                arguments[field.name] = self._value(field.name, value)
        if isinstance(arguments.get("num_heads"), tuple | list) and isinstance(arguments.get("embed_dim"), int):
            arguments["embed_dim"] = 8 * arguments["num_heads"][0]
        if "kv_lora_rank" in arguments and "num_attention_heads" in arguments:
            arguments["num_key_value_heads"] = arguments["num_attention_heads"]  # latent attention has no groups
        arguments |= _backbone_stages(default)
        overrides = OVERRIDES.get(default.model_type, {})
        for name, value in overrides.items():
            inside = arguments.get(name)
            if isinstance(value, Mapping) and "model_type" not in value and isinstance(inside, PreTrainedConfig):
                arguments[name] = type(inside)(**{**_given(inside), **value})
            else:
                arguments[name] = value
        return arguments

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int):
            return self._number(name, value)
        if isinstance(value, tuple | list) and value and all(type(item) is int for item in value):
            return list(self._numbers(name, tuple(value)))
        return list(value) if isinstance(value, tuple) else value  # a config that was loaded has lists

    def _number(self, name: str, value: int) -> int:
        small = EXACT.get(name)
        if small is not None and (self.widths or small not in (WIDTH, NUM_HEADS, HEAD_DIM, 8, 12, 48)):
            return min(value, small)
        if name == "patch_size" and value > PATCH_SIZE:
            return PATCH_SIZE
        if self.guess and self.widths and value >= _GUESS_LEAST and _GUESSED_WIDTH.search(name):
            return value if _NOT_WIDTHS.search(name) or _TOKEN_ID.search(name) else WIDTH
        return value

    def _numbers(self, name: str, values: tuple[int, ...]) -> tuple[int, ...]:
        if _DEPTH_LISTS.search(name):
            return tuple(min(value, 2) for value in values)
        if _LAYER_LISTS.search(name) and name != "out_indices" and max(values) >= NUM_LAYERS:
            return tuple(min(index, NUM_LAYERS - 1) for index in range(len(values)))
        if name in ("image_size", "input_size"):
            return tuple(min(value, IMAGE_SIZE) for value in values)
        if name == "patch_size":
            return tuple(min(value, PATCH_SIZE) for value in values)
        if self.widths and _WIDTH_LISTS.search(name) and not _NOT_WIDTHS.search(name):
            least = min(values)
            if least > _SMALLEST_LIST_WIDTH:
                return tuple(max(8, round(value * _SMALLEST_LIST_WIDTH / least / 8) * 8) for value in values)
        return values


def _backbone_stages(default: PreTrainedConfig) -> dict[str, Any]:
    """Which stages a backbone gives: the same, or as many layers as it gives where stages are layers."""
    features, indices = (vars(default).get(name) for name in ("_out_features", "_out_indices"))
    if not features or not indices:
        return {}
    layers = next((name for name in ("num_hidden_layers", "num_layers", "depth") if name in vars(default)), None)
    if layers is None or any(name in vars(default) for name in ("depths", "stage_out_channels", "hidden_sizes")):
        return {"out_features": list(features)}
    return {layers: max(NUM_LAYERS, len(indices)), "out_indices": [1 + index for index in range(len(indices))]}


def _given(config: PreTrainedConfig) -> dict[str, Any]:
    return {field.name: vars(config).get(field.name) for field in dataclasses.fields(config)}


def parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The config and those inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts(value)


def fit_rope_sections(config: PreTrainedConfig) -> None:
    """Divide the rotated part of a head among time, height and width, where a config does so."""
    rope = vars(config).get("rope_parameters")
    if not isinstance(rope, dict) or "mrope_section" not in (config.ignore_keys_at_rope_validation or ()):
        return
    head_dim = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def spread_token_ids(config: PreTrainedConfig) -> None:
    """Give every special token that lies beyond the small vocabulary an id of its own inside it."""
    ids: dict[str, int] = {}
    for part in parts(config):
        for name, value in list(vars(part).items()):
            if not _TOKEN_ID.search(name):
                continue
            if type(value) is int and value >= VOCABULARY:
                setattr(part, name, ids.setdefault(name, VOCABULARY - 1 - len(ids)))
            elif isinstance(value, list | tuple) and any(type(item) is int and item >= VOCABULARY for item in value):
                setattr(
                    part, name, [ids.setdefault(f"{name}.{i}", VOCABULARY - 1 - len(ids)) for i, _ in enumerate(value)]
                )


LEVELS = (
    Shrink(guess=True, widths=True),
    Shrink(guess=False, widths=True),
    Shrink(guess=False, widths=False),
)
"""Tried in this order until one builds and runs."""
