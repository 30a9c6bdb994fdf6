"""What each keyword of a transformers `forward` is filled with.

Owns shapes, dtypes and ranges of example values, from the model's config. Knows no single architecture. The one
decision: values break symmetries (three rows, two of them shorter, no two values alike, no size equal to another).
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.diagnostics.zoo_configs import VOCABULARY, parts

BATCH = 3
"""Equal to no small count of heads, groups or layers, which export would take for a fact about the model."""
TOKENS = 9
DECODER_TOKENS = 5
FRAMES = 48
"""Of a spectrogram."""
SAMPLES = 4000
"""Of a waveform."""
GRID = (1, 4, 6)
"""Time, height and width in patches, where images come as a list of patches."""
VIDEO_GRID = (2, 4, 6)
_NUM_PATCHES = math.prod(GRID)
_GRIDS = ("image_grid_thw", "grid_thw", "image_grid_hws", "grid_hw", "spatial_shapes")


class Facts:
    """What the makers ask about a model."""

    def __init__(self, model: PreTrainedModel, *, seed: int) -> None:
        self.config: PreTrainedConfig = model.config
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = inspect.signature(model.forward).parameters

    def find(self, *names: str, default: Any) -> Any:
        """The first of the fields that the config, or a config inside it, has."""
        for name in names:
            for config in parts(self.config):
                value = vars(config).get(config.attribute_map.get(name, name))
                if value is not None:
                    return value
        return default

    def number(self, *names: str, default: int) -> int:
        """Like `find`; the first item of a list."""
        value = self.find(*names, default=default)
        return int(value[0]) if isinstance(value, list | tuple) else int(value)

    def normal(self, *shape: int) -> torch.Tensor:
        """Random floats."""
        return torch.randn(*shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Random integers in [low, high)."""
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def tokens(self, length: int) -> torch.Tensor:
        """Token ids that are none of the special ones."""
        vocabulary = min(self.number("vocab_size", default=VOCABULARY), VOCABULARY)
        return self.integers(min(5, vocabulary - 1), max(vocabulary - 20, 6), BATCH, length)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width."""
        value = self.find("image_size", "input_size", "img_size", default=64)
        return (int(value[0]), int(value[-1])) if isinstance(value, list | tuple) else (int(value), int(value))

    @property
    def channels(self) -> int:
        """Colours of an image."""
        return self.number("num_channels", "in_channels", "in_chans", "num_input_channels", default=3)

    @property
    def width(self) -> int:
        """Size of a hidden state."""
        return self.number("hidden_size", "d_model", default=32)

    @property
    def mel_bins(self) -> int:
        """Height of a spectrogram."""
        names = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_feat_size")
        return self.number(*names, "feature_size", "input_dim", default=16)


def _mask(length: int) -> torch.Tensor:
    """Ones; the second row ends two entries early, the third one."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    mask[1, -2:] = 0
    mask[2, -1:] = 0
    return mask


def _image(facts: Facts) -> torch.Tensor:
    if any(name in facts.parameters for name in _GRIDS):
        return _patches(facts)
    return facts.normal(BATCH, facts.channels, *facts.image_size)


def _patch_width(facts: Facts) -> int:
    patch = facts.number("patch_size", default=8)
    return facts.channels * facts.number("temporal_patch_size", default=1) * patch * patch


def _patches(facts: Facts) -> torch.Tensor:
    """Patches of all images one after another."""
    return facts.normal(BATCH * _NUM_PATCHES, _patch_width(facts))


def _patch_images(facts: Facts) -> torch.Tensor:
    patch = facts.number("patch_size", default=8)
    return facts.normal(BATCH * _NUM_PATCHES, facts.channels, patch, patch)


def _patch_rows(facts: Facts) -> torch.Tensor:
    return facts.normal(BATCH, _NUM_PATCHES, _patch_width(facts))


def _hidden(facts: Facts) -> torch.Tensor:
    if any(name in facts.parameters for name in _GRIDS):
        return _patches(facts)
    return facts.normal(BATCH, TOKENS, facts.width)


def _video(facts: Facts) -> torch.Tensor:
    frames = facts.number("num_frames", "frames_per_clip", default=2)
    return facts.normal(BATCH, frames, facts.channels, *facts.image_size)


def _boxes(facts: Facts) -> torch.Tensor:
    corners = facts.integers(0, 30, BATCH, TOKENS, 4)
    corners[..., 2:] += corners[..., :2]
    return corners


def _frames(facts: Facts) -> int:
    positions = facts.find("max_source_positions", "max_length", default=None)
    return 2 * int(positions) if positions and int(positions) < 100 else FRAMES


def _series(facts: Facts) -> torch.Tensor:
    channels = facts.find("num_input_channels", default=None)
    return facts.normal(BATCH, _past(facts), *((int(channels),) if channels else ()))


def _past(facts: Facts) -> int:
    context = facts.number("context_length", "prediction_length", default=24)
    lags = facts.find("lags_sequence", default=(0,))
    return context + int(max(lags))


def _time(facts: Facts, length: int) -> torch.Tensor:
    return facts.normal(BATCH, length, facts.number("num_time_features", default=1))


MAKERS: Mapping[str, tuple[Callable[[Facts], Any], ...]] = {
    "input_ids": (
        lambda f: f.tokens(TOKENS),
        lambda f: f.integers(5, 15, BATCH, TOKENS, f.number("num_codebooks", default=4)),
        lambda f: f.integers(5, 15, BATCH, f.number("num_codebooks", default=4) + 1, TOKENS),
    ),
    "attention_mask": (lambda f: _mask(TOKENS),),
    "decoder_input_ids": (
        lambda f: f.tokens(DECODER_TOKENS),
        lambda f: f.integers(5, 15, BATCH, DECODER_TOKENS, f.number("num_channels", default=9)),
        lambda f: f.integers(5, 15, BATCH * f.number("num_codebooks", default=4), DECODER_TOKENS),
    ),
    "mm_token_type_ids": (lambda f: torch.zeros(BATCH, TOKENS, dtype=torch.int64),),
    "pixel_values": (_image, _video, _patches, _patch_images, _patch_rows, lambda f: _image(f)[:, None]),
    "pixel_values_videos": (_video, _patches),
    "image_grid_thw": (lambda f: torch.tensor([GRID] * BATCH),),
    "video_grid_thw": (lambda f: torch.tensor([VIDEO_GRID] * BATCH),),
    "grid_thw": (lambda f: torch.tensor([GRID] * BATCH),),
    "image_grid_hws": (lambda f: torch.tensor([GRID[1:]] * BATCH),),
    "spatial_shapes": (lambda f: torch.tensor([GRID[1:]] * BATCH),),
    "merge_sizes": (lambda f: torch.ones(BATCH, dtype=torch.int64),),
    "pixel_attention_mask": (
        lambda f: torch.ones(BATCH, _NUM_PATCHES, dtype=torch.int64),
        lambda f: torch.ones(BATCH, *f.image_size, dtype=torch.int64),
        lambda f: torch.ones(BATCH, 1, *f.image_size, dtype=torch.bool),
    ),
    "pixel_position_ids": (lambda f: _grid_positions(),),
    "flattened_patches": (lambda f: f.normal(BATCH, TOKENS, 2 + _patch_width(f)),),
    "bbox": (_boxes,),
    "image": (_image,),
    "input_features": (
        lambda f: f.normal(BATCH, _frames(f), f.mel_bins),
        lambda f: f.normal(BATCH, f.mel_bins, _frames(f)),
        lambda f: f.normal(BATCH, 1, _frames(f), f.mel_bins),
        lambda f: f.normal(BATCH, f.mel_bins, 2 * f.number("max_source_positions", default=FRAMES)),
        lambda f: f.normal(BATCH, FRAMES, 80),
    ),
    "input_features_mask": (
        lambda f: torch.ones(BATCH, _frames(f), dtype=torch.int64),
        lambda f: torch.ones(BATCH, _frames(f), dtype=torch.bool),
    ),
    "image_embeds_position_mask": (lambda f: (torch.arange(TOKENS) < TOKENS - 1).repeat(BATCH, 1),),
    "feature_attention_mask": (lambda f: torch.ones(BATCH, _frames(f), dtype=torch.int64),),
    "image_sizes": (lambda f: torch.tensor([f.image_size] * BATCH),),
    "is_longer": (lambda f: torch.tensor([[False]] * BATCH),),
    "feature_lens": (lambda f: torch.tensor([_frames(f)] * BATCH),),
    "audio_mel": (lambda f: f.normal(BATCH, FRAMES, f.mel_bins),),
    "audio_mel_mask": (lambda f: torch.zeros(BATCH, FRAMES, dtype=torch.bool),),
    "input_values": (
        lambda f: f.normal(BATCH, SAMPLES),
        lambda f: f.normal(BATCH, 1, SAMPLES),
        lambda f: f.normal(BATCH, f.number("max_length", default=FRAMES), f.mel_bins),
        lambda f: f.tokens(TOKENS),
        lambda f: f.normal(BATCH, TOKENS, f.width),
    ),
    "decoder_input_values": (
        lambda f: f.normal(BATCH, DECODER_TOKENS * 2, f.mel_bins),
        lambda f: f.normal(BATCH, DECODER_TOKENS * 2, f.width),
    ),
    "inputs_embeds": (lambda f: f.normal(BATCH, TOKENS, f.width),),
    "query_embeds": (lambda f: f.normal(BATCH, TOKENS, f.width),),
    "encoder_hidden_states": (lambda f: f.normal(BATCH, TOKENS + 2, f.width),),
    "hidden_states": (_hidden, lambda f: f.normal(BATCH, f.width, TOKENS)),
    "qformer_input_ids": (lambda f: f.tokens(TOKENS - 2),),
    "inputs": (
        lambda f: f.normal(BATCH, TOKENS, f.number("d_model", default=32)),
        lambda f: f.normal(BATCH, SAMPLES),
    ),
    "input": (_image,),
    "states": (lambda f: f.normal(BATCH, TOKENS, f.number("state_dim", default=17)),),
    "actions": (lambda f: f.normal(BATCH, TOKENS, f.number("act_dim", default=4)),),
    "rewards": (lambda f: f.normal(BATCH, TOKENS, 1),),
    "returns_to_go": (lambda f: f.normal(BATCH, TOKENS, 1),),
    "timesteps": (lambda f: torch.arange(TOKENS).repeat(BATCH, 1),),
    "past_values": (_series,),
    "past_values_padding": (lambda f: torch.zeros(_series(f).shape),),
    "freq": (lambda f: torch.zeros(BATCH, 1, dtype=torch.int64),),
    "past_time_features": (lambda f: _time(f, _past(f)),),
    "past_observed_mask": (lambda f: torch.ones(_series(f).shape),),
    "future_time_features": (lambda f: _time(f, f.number("prediction_length", default=8)),),
    "future_values": (lambda f: f.normal(BATCH, f.number("prediction_length", default=8)),),
    "visual_feats": (lambda f: f.normal(BATCH, 6, f.number("visual_feat_dim", default=32)),),
    "visual_pos": (lambda f: f.normal(BATCH, 6, 4),),
    "visual_embeds": (lambda f: f.normal(BATCH, 6, f.number("visual_embedding_dim", default=32)),),
    "spectrogram": (lambda f: f.normal(BATCH, 24, f.number("model_in_dim", "num_mel_bins", default=16)),),
    "latents": (lambda f: f.normal(BATCH, f.number("latent_dim", "hidden_size", default=32), TOKENS),),
    "audio_codes": (lambda f: f.integers(0, 10, BATCH, f.number("num_quantizers", default=4), 12),),
}
"""Keyword of `forward` -> the forms it may have, the usual one first."""


def _grid_positions() -> torch.Tensor:
    rows = torch.arange(GRID[1]).repeat_interleave(GRID[2])
    columns = torch.arange(GRID[2]).repeat(GRID[1])
    return torch.stack([columns, rows], dim=-1).repeat(BATCH, 1, 1)
