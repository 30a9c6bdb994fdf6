"""A decoder that completes text.

Owns the way from a loaded decoder to an engine behind `/v1/completions`. Knows nothing of Ray.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pipeline.errors import ParameterError
from pipeline.models.config_file import read_config
from pipeline.models.decoders.model import Decoder
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.scheduler import Limits
from pipeline.serving.engine.tokenizer_file import read_tokenizer
from pipeline.serving.grammar.structured_grammar import GrammarCompiler
from pipeline.serving.grammar.vocabulary import Vocabulary
from pipeline.serving.hosting.completion_engine import make_engine, make_executors
from pipeline.serving.hosting.loading_plan import limits_of
from pipeline.serving.hosting.served_model import LoadedModel, ServedModel
from pipeline.serving.hosting.stop_tokens import read_stop_ids
from pipeline.serving.http import sampling_fields
from pipeline.serving.http.access import access_of
from pipeline.serving.http.chat_template import read_chat_template
from pipeline.serving.http.http import make_surface
from pipeline.serving.http.text_surface import TextSurface
from pipeline.serving.replica_settings import ReplicaSettings

ENDPOINT = "completions"


def serve_completions(loaded: LoadedModel) -> ServedModel:
    """Compile and start the engine.

    Raises:
        ArtifactError: the tokenizer is missing, damaged or of another model.
        ParameterError: the context is longer than the model's.
        EngineUnavailable: warm-up failed.
    """
    settings, model = loaded.settings, loaded.module
    assert isinstance(model, Decoder)
    config = read_config(loaded.directory)
    num_tokens = model.config.vocab_size
    tokenizer = read_tokenizer(loaded.directory, num_tokens=num_tokens)
    template = read_chat_template(loaded.directory)
    stop_ids = read_stop_ids(loaded.directory, config=config, tokenizer=tokenizer, num_tokens=num_tokens)
    limits = _limits(settings, model)
    executors = make_executors(loaded, limits=limits)
    vocabulary = Vocabulary(tokenizer, num_tokens=num_tokens, stop_ids=stop_ids)
    engine = make_engine(executors, decoder=vocabulary, metrics=Metrics(model=settings.name), leader=loaded.leader)
    engine.version = settings.version_label
    engine.start()
    served = sampling_fields.ServedModel(
        name=settings.name,
        context=limits.context,
        num_tokens=num_tokens,
        stop_ids=stop_ids,
        max_logprobs=limits.max_logprobs,
    )
    grammars = GrammarCompiler(vocabulary)

    def surface(facts: Mapping[str, Any]) -> TextSurface:
        return make_surface(
            engine=engine,
            encoder=tokenizer,
            decoder=vocabulary,
            model=served,
            facts=facts,
            template=template,
            compile_grammar=grammars.answer,
            access=access_of(settings),
        )

    facts = {
        "context_tokens": limits.context,
        "mesh": asdict(settings.mesh),
        "deterministic": limits.is_deterministic,
        "has_chat_template": template is not None,
        "num_executables": executors[0].buckets.num_executables,
        "temporary_bytes": executors[0].temporary_bytes,
        "warm_up_seconds": round(engine.warm_up_seconds, 3),
    }
    return ServedModel(
        engine=engine,
        endpoint=ENDPOINT,
        facts=facts,
        make_surface=surface,
        leaves_of=executors[0].leaves_of if loaded.leader is None else None,
        swap=(lambda leaves, label: engine.swap(leaves, label=label).leaves) if loaded.leader is None else None,
        close=grammars.close,
    )


def _limits(settings: ReplicaSettings, model: Decoder) -> Limits:
    assert settings.slots is not None, "what the flow left open was decided when loading was planned"
    limits = limits_of(settings, slots=settings.slots, context=settings.context or model.config.longest_context)
    _check_context(limits, model)
    return limits


def _check_context(limits: Limits, model: Decoder) -> None:
    longest = model.config.longest_context
    if limits.context > longest:
        raise ParameterError(
            f"max_context_tokens is {limits.context}, but the model can be served with {longest} positions",
            hint=f"use at most {longest}",
        )
