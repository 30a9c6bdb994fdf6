"""The rows of decoder-only language models.

Owns which decoders exist and what they are given as an example. Knows nothing of weights.
"""

from collections.abc import Mapping

import numpy as np

from pipeline.models.description import Arrays, ModelKind
from pipeline.models.family import Family
from pipeline.models.llama import Llama
from pipeline.models.llama_config import LlamaConfig


def _tokens(config: LlamaConfig, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    length = min(24, config.max_position_embeddings)
    return {"input_ids": rng.integers(0, config.vocab_size, size=(3, length), dtype=np.int32)}


DECODERS: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            kind=lambda _: ModelKind.CAUSAL_LM,
            config=LlamaConfig,
            module=Llama,
            example_inputs=_tokens,
            forward=lambda module, inputs: {"logits": module(inputs["input_ids"])},
        ),
    )
}
