"""The rows of decoder-only language models.

Owns which decoders exist and what they are given as an example. Knows nothing of weights.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.model import Decoder
from pipeline.models.decoders.readers import OUTER, READERS, read_decoder
from pipeline.models.description import Arrays, ModelKind
from pipeline.models.family import Family

_EXAMPLE_ROWS = 3
_EXAMPLE_TOKENS = 40


class DecoderReader:
    """The config class of every decoder."""

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> DecoderConfig:
        """See `read_decoder`."""
        return read_decoder(config)


def _tokens(config: DecoderConfig, seed: int) -> Arrays:
    """Rows of several lengths, padded on the right."""
    rng = np.random.default_rng(seed)
    length = min(_EXAMPLE_TOKENS, config.max_position_embeddings)
    tokens = rng.integers(0, config.vocab_size, size=(_EXAMPLE_ROWS, length), dtype=np.int32)
    num_real = length - np.arange(_EXAMPLE_ROWS) * (length // 4)
    return {"input_ids": tokens, "attention_mask": (np.arange(length) < num_real[:, None]).astype(np.int32)}


def _forward(module: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {"logits": module(inputs["input_ids"], attention_mask_BT=inputs.get("attention_mask"))}


DECODERS: Mapping[str, Family] = {
    model_type: Family(
        model_type=model_type,
        kind=lambda _: ModelKind.CAUSAL_LM,
        config=DecoderReader,
        module=Decoder,
        example_inputs=_tokens,
        forward=_forward,
    )
    for model_type in (*READERS, *OUTER)
}
