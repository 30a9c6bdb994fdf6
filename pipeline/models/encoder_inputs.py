"""Example inputs of encoders, by torch's keyword.

Owns what a parity check is fed. Knows no weights. The one decision: examples break symmetries: rows of several lengths,
padding at the end, every number drawn.

Shape suffixes: B batch, T tokens.
"""

from typing import Any

import numpy as np

from pipeline.models.description import Arrays
from pipeline.models.encoders.bert_config import BertConfig
from pipeline.models.encoders.clip_config import ClipConfig
from pipeline.models.encoders.convnext_config import ConvnextConfig
from pipeline.models.encoders.resnet_config import ResnetConfig
from pipeline.models.encoders.t5_config import T5Config
from pipeline.models.encoders.vit_config import VitConfig
from pipeline.models.encoders.whisper_config import WhisperConfig

NUM_ROWS = 3
NUM_TOKENS = 24
NUM_WRITTEN = 7
FREE_IMAGE_SIZE = (71, 58)
"""For models that take any size: no multiple of a stride, and higher than wide."""


def bert_inputs(config: BertConfig, seed: int) -> Arrays:
    """Texts of several lengths with token types."""
    rng = np.random.default_rng(seed)
    length = min(NUM_TOKENS, config.longest_text)
    tokens_BT, mask_BT = _texts(rng, length=length, vocab_size=config.vocab_size, padding=config.pad_token_id)
    types_BT = rng.integers(0, config.type_vocab_size, size=tokens_BT.shape, dtype=np.int32)
    return {"input_ids": tokens_BT, "attention_mask": mask_BT, "token_type_ids": types_BT}


def t5_inputs(config: T5Config, seed: int) -> Arrays:
    """Texts of several lengths, and what the decoder has written."""
    rng = np.random.default_rng(seed)
    tokens_BT, mask_BT = _texts(rng, length=NUM_TOKENS, vocab_size=config.vocab_size, padding=config.pad_token_id)
    inputs = {"input_ids": tokens_BT, "attention_mask": mask_BT}
    if config.has_decoder:
        start = config.decoder_start_token_id
        inputs["decoder_input_ids"] = _written(rng, start=start, vocab_size=config.vocab_size, length=NUM_WRITTEN)
    return inputs


def whisper_inputs(config: WhisperConfig, seed: int) -> Arrays:
    """Features of sounds, and what the decoder has written."""
    rng = np.random.default_rng(seed)
    length = min(NUM_WRITTEN, config.max_target_positions)
    return {
        "input_features": _drawn(rng, (2, config.num_mel_bins, config.num_frames)),
        "decoder_input_ids": _written(
            rng, start=config.decoder_start_token_id, vocab_size=config.vocab_size, length=length
        )[:2],
    }


def clip_inputs(config: ClipConfig, seed: int) -> Arrays:
    """Texts of several lengths, each ending with its end-of-text token, and another number of images."""
    rng = np.random.default_rng(seed)
    text, size = config.text, config.vision.image_size
    end = text.vocab_size - 1 if text.pools_largest_token else text.eos_token_id
    length = min(NUM_TOKENS, text.max_position_embeddings)
    tokens_BT, mask_BT = _texts(rng, length=length, vocab_size=text.vocab_size - 1, padding=0)
    tokens_BT[tokens_BT == end] = 0
    tokens_BT[np.arange(NUM_ROWS), mask_BT.sum(axis=1) - 1] = end
    pixels = _drawn(rng, (2, config.vision.num_channels, size, size))
    return {"input_ids": tokens_BT, "attention_mask": mask_BT, "pixel_values": pixels}


def vit_inputs(config: VitConfig, seed: int) -> Arrays:
    """Images of the config's size."""
    shape = (NUM_ROWS, config.num_channels, *config.image_size)
    return {"pixel_values": _drawn(np.random.default_rng(seed), shape)}


def free_image_inputs(config: ResnetConfig | ConvnextConfig, seed: int) -> Arrays:
    """Images of a size that no stride divides."""
    shape = (NUM_ROWS, config.num_channels, *FREE_IMAGE_SIZE)
    return {"pixel_values": _drawn(np.random.default_rng(seed), shape)}


def _texts(rng: np.random.Generator, *, length: int, vocab_size: int, padding: int) -> tuple[Any, Any]:
    """int32 tokens [B, T] and their mask: whole, two thirds and one third of `length`, the rest padding."""
    tokens_BT = rng.integers(0, vocab_size, size=(NUM_ROWS, length), dtype=np.int32)
    lengths_B = np.array([length, max(1, 2 * length // 3), max(1, length // 3)])
    mask_BT = (np.arange(length) < lengths_B[:, None]).astype(np.int32)
    tokens_BT[mask_BT == 0] = padding
    return tokens_BT, mask_BT


def _written(rng: np.random.Generator, *, start: int, vocab_size: int, length: int) -> Any:
    tokens_BT = rng.integers(0, vocab_size, size=(NUM_ROWS, length), dtype=np.int32)
    tokens_BT[:, 0] = start
    return tokens_BT


def _drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)
