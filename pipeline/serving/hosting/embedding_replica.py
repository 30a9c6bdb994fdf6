"""An encoder that embeds text.

Owns the way from a loaded encoder to a micro-batcher behind `/v1/embeddings`: what it is given, how its hidden states
become a vector, and how long a text may be. Knows nothing of Ray. The one decision: pooling is part of the compiled
function, so one vector a text leaves the device.

Shape suffixes: B batch, T tokens, D hidden size.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.errors import ParameterError
from pipeline.models.config_file import read_config
from pipeline.models.description import ModelDescription
from pipeline.models.family import FamilyModel
from pipeline.models.traced.description import TracedModel
from pipeline.serving.engine.forward_executor import (
    LENGTH,
    ForwardExecutor,
    ForwardShapes,
    InputForm,
    batch_sizes,
    length_sizes,
)
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.micro_batcher import BatchLimits, MicroBatcher
from pipeline.serving.engine.passes import PassShapes
from pipeline.serving.engine.pooling import Pooling
from pipeline.serving.engine.tokenizer_file import read_tokenizer
from pipeline.serving.hosting.served_model import LoadedModel, ServedModel
from pipeline.serving.http.access import access_of
from pipeline.serving.http.embedding_http import EMBEDDING, EmbeddingSurface
from pipeline.serving.http.embedding_request import EmbeddingModel
from pipeline.serving.http.model_registry import Surface

ENDPOINT = "embeddings"
HIDDEN = "last_hidden_state"
UNLIMITED_TOKENS = 512
"""Where neither the model nor its files name a longest text."""
CPU_PASS_TOKENS = 1024
"""A pass over more tokens takes as much longer on a CPU, so larger shapes would only be compiled in vain."""
PASS_TOKENS = 64
"""What a pass costs by itself, in padded tokens. MiniLM on two cores is as fast with 64 as with 128 and 256 where
products leave padding out, and with XLA's slower with 12 and with 128."""
_ZEROS = ("token_type_ids",)
"""Inputs that are 0 for a text that is no pair."""


def serve_embeddings(loaded: LoadedModel) -> ServedModel:
    """Compile and start the micro-batcher.

    Raises:
        ArtifactError: the tokenizer or the pooling files are missing or damaged.
        ParameterError: the model gives no hidden states, takes inputs that a text does not bring, or the context is
            longer than the model's.
        EngineUnavailable: warm-up failed.
    """
    settings, config = loaded.settings, read_config(loaded.directory)
    num_tokens = int(config.get("vocab_size", 0))
    tokenizer = read_tokenizer(loaded.directory, num_tokens=num_tokens)
    pooling = Pooling.read(loaded.directory)
    longest = longest_text(loaded.description, config)
    max_tokens = settings.context or min(longest, pooling.max_tokens or longest)
    if max_tokens > longest:
        raise ParameterError(
            f"max_context_tokens is {max_tokens}, but the model was made for {longest} tokens",
            hint=f"use at most {longest}",
        )
    executor = ForwardExecutor(
        loaded.module,
        forward=text_forward(loaded.description, pooling=pooling),
        shapes=_shapes(loaded, max_tokens=max_tokens, padding=int(config.get("pad_token_id") or 0)),
        device=loaded.device,
        dtype=loaded.placement.dtype,
    )
    limits = BatchLimits(max_batch_rows=settings.max_batch_rows, wait_seconds=settings.batch_wait_seconds)
    engine = MicroBatcher(executor, limits=limits, metrics=Metrics(model=settings.name))
    engine.version = settings.version_label
    engine.start()
    (size,) = executor.outputs[EMBEDDING]
    model = EmbeddingModel(name=settings.name, max_tokens=max_tokens, num_tokens=num_tokens, size=size)

    def surface(facts: Mapping[str, Any]) -> Surface:
        return EmbeddingSurface(engine=engine, encoder=tokenizer, model=model, facts=facts, access=access_of(settings))

    facts = {
        "context_tokens": max_tokens,
        "dimensions": size,
        "pooling": ", ".join(pooling.modes) + (", normalized" if pooling.is_normalized else ""),
        "pooling_reason": pooling.reason,
        "max_batch_rows": limits.max_batch_rows,
        "num_executables": executor.num_executables,
        "warm_up_seconds": round(engine.warm_up_seconds, 3),
    }
    return ServedModel(
        engine=engine,
        endpoint=ENDPOINT,
        facts=facts,
        make_surface=surface,
        leaves_of=executor.leaves_of,
        swap=lambda leaves, label: engine.swap(leaves, label=label),
    )


def _shapes(loaded: LoadedModel, *, max_tokens: int, padding: int) -> ForwardShapes:
    passes = PassShapes(
        batches=batch_sizes(loaded.settings.max_batch_rows),
        lengths=length_sizes(max_tokens),
        most_tokens=CPU_PASS_TOKENS if loaded.placement.device == "cpu" else None,
        tokens_of_pass=PASS_TOKENS,
    )
    inputs = {
        "input_ids": InputForm(shape=(LENGTH,), dtype="int32", padding=padding),
        "attention_mask": InputForm(shape=(LENGTH,), dtype="int32"),
    }
    return ForwardShapes(inputs=inputs, passes=passes)


def longest_text(description: ModelDescription, config: Mapping[str, Any]) -> int:
    """Tokens of the longest text the model has positions for."""
    if isinstance(description, FamilyModel):
        return int(getattr(description.parsed, "longest_text", UNLIMITED_TOKENS))
    stated = int(config.get("max_position_embeddings") or UNLIMITED_TOKENS)
    if not isinstance(description, TracedModel):
        return stated
    size = description.program.inputs["input_ids"].shape[-1]
    limit = size if isinstance(size, int) else description.program.dimensions[size].high
    return stated if limit is None else min(stated, limit)


def text_forward(
    description: ModelDescription, *, pooling: Pooling
) -> Callable[[nnx.Module, Mapping[str, Any]], dict[str, jax.Array]]:
    """`(module, {input_ids, attention_mask}) -> {embedding}` of a model that gives hidden states.

    Raises:
        ParameterError: it takes inputs that a text does not bring; when called, it gives no hidden states.
    """
    examples = description.example_inputs(seed=0)
    unknown = [name for name in examples if name not in ("input_ids", "attention_mask", *_ZEROS)]
    if unknown or "input_ids" not in examples:
        raise ParameterError(
            f"{description.name}: takes {', '.join(examples)}; a text brings input_ids and attention_mask",
            hint="/v1/embeddings serves encoders of text",
        )

    def forward(module: nnx.Module, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        tokens_BT, mask_BT = inputs["input_ids"], inputs["attention_mask"]
        given = {"input_ids": tokens_BT, "attention_mask": mask_BT}
        given |= {name: jnp.zeros_like(tokens_BT) for name in _ZEROS}
        made = description.forward(module, {name: given[name].astype(examples[name].dtype) for name in examples})
        if HIDDEN not in made:
            raise ParameterError(
                f"{description.name}: gives {', '.join(made)}; /v1/embeddings needs {HIDDEN}",
                hint="convert the encoder without its head",
            )
        return {EMBEDDING: pooling(made[HIDDEN], mask_BT)}

    return forward
