"""Bytes of a decoder's weights in each dtype, from its config alone.

Owns that arithmetic. Pure, without jax, so a deployment is judged before its process starts.
"""

from pipeline.models.decoders.config import DecoderConfig

BYTES_OF = {"float32": 4, "bfloat16": 2}
INT8 = "int8"
_SCALE_BYTES = 4


def compute_dtype(dtype: str, *, device: str) -> str:
    """What activations, cache and everything but the projections are in."""
    if dtype != INT8:
        return dtype
    return "float32" if device == "cpu" else "bfloat16"


def weights_bytes(config: DecoderConfig, *, dtype: str, device: str) -> int:
    """Of all parameters as they are served in `dtype`; on a CPU a tied head of floats is held twice."""
    size = BYTES_OF[compute_dtype(dtype, device=device)]
    if dtype == INT8:
        numbers, channels = _projected(config)
        return (config.num_parameters - numbers) * size + numbers + channels * _SCALE_BYTES
    is_twice = device == "cpu" and config.tie_word_embeddings
    return (config.num_parameters + is_twice * config.vocab_size * config.hidden_size) * size


def step_bytes(config: DecoderConfig, *, dtype: str, device: str) -> int:
    """Of the weights that one decode step of one request reads.

    Tables are looked up, not read; a tied one is the head. Of experts a token reads its own. On a CPU int8 counts as
    float32: the conversion takes as long as reading four bytes (29.7 and 25.3 ms a token of SmolLM2-135M).
    """
    if dtype == INT8 and device == "cpu":
        dtype = "float32"
    numbers = config.num_parameters
    if not config.tie_word_embeddings:
        numbers -= config.vocab_size * config.hidden_size
    if config.learns_positions:
        numbers -= config.max_position_embeddings * config.hidden_size
    experts = config.experts
    if experts is not None:
        num_layers = sum(layer.has_experts for layer in config.layers)
        one = (3 if config.is_gated else 2) * config.hidden_size * experts.intermediate_size
        numbers -= num_layers * (experts.num - experts.num_per_token) * one
    if dtype != INT8:
        return numbers * BYTES_OF[dtype]
    projected, channels = _projected(config)
    return (numbers - projected) * BYTES_OF["bfloat16"] + projected + channels * _SCALE_BYTES


def _projected(config: DecoderConfig) -> tuple[int, int]:
    """Numbers and output channels of the projections that int8 takes the place of."""
    wide = config.num_attention_heads * config.head_dim
    narrow = config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    num_in = 2 if config.is_gated else 1
    numbers = 2 * hidden * (wide + narrow) + (num_in + 1) * hidden * inner
    channels = wide + 2 * narrow + 2 * hidden + num_in * inner
    head = 0 if config.tie_word_embeddings else config.vocab_size
    return len(config.layers) * numbers + head * hidden, len(config.layers) * channels + head
