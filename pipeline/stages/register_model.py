"""`register.model`: a version in the model registry, with its lineage.

Owns what a version says of where it comes from and why it may be trusted. Knows nothing of MLflow. The one decision:
everything a person would ask of a version later (which runs, which bytes, which gates at which values) is a tag of the
version itself, so the answer outlives the store and the runs.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from pipeline.artifacts.commit import Commit, find_commit
from pipeline.artifacts.store import open_store
from pipeline.errors import GateError, TrackingError
from pipeline.spec.gate import GateVerdict
from pipeline.stages.parameters import RegisterModelParameters
from pipeline.stages.protocol import InputArtifact, ModelRegistry, StageContext, StageResult


def why_not_registered(commit: Commit, environment: Mapping[str, str], registry: ModelRegistry | None) -> str | None:
    """Why a committed registration no longer holds, or None; a registry that cannot be asked speaks against nothing."""
    name, version = str(commit.facts["name"]), str(commit.facts["version"])
    try:
        is_there = registry is None or registry.has(name=name, version=version)
    except TrackingError:
        return None
    return None if is_there else f"the registry has no version {version} of {name!r} any more"


def run(context: StageContext[RegisterModelParameters]) -> StageResult:
    """Register the model and move the alias; writes `registration/registration.json`.

    Raises:
        GateError: a gate of the model or of its evidence does not hold; lists every one.
        TrackingError: the registry is away or refused, or this run has none.
    """
    parameters = context.parameters
    model = context.input("model")
    evidence = [context.inputs[name] for name in sorted(context.inputs) if name.startswith("evidence.")]
    _refuse_failed_gates(context.stage, [model, *evidence])
    if context.registry is None:
        raise TrackingError(f"stage {context.stage!r}: it got no model registry", hint="it must run on the driver")
    tags = version_tags(context, model=model, evidence=evidence)
    source = _source(context.environment, model)
    context.reporter.note(f"registering {parameters.name} from {source}")
    version = context.registry.register(
        name=parameters.name,
        source=source,
        tags=tags,
        alias=parameters.alias,
        description=_description(context, evidence),
    )
    registration = {**asdict(version), "source": source, "tags": tags}
    path = context.output("registration") / "registration.json"
    path.write_text(json.dumps(registration, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return StageResult(
        metrics={"version": float(version.version)},
        facts={"name": version.name, "version": version.version, "alias": version.alias, "uri": version.uri},
    )


def version_tags(
    context: StageContext[RegisterModelParameters], *, model: InputArtifact, evidence: list[InputArtifact]
) -> dict[str, str]:
    """The tags of the version: the registering run, the model, every ancestor, every gate verdict and metric.

    `gate.METRIC` is `VALUE COMPARISON LIMIT holds`; where two stages judge the same metric it is `gate.STAGE.METRIC`.
    """
    tags = {
        "pipeline.run_id": context.run_id,
        "pipeline.flow": context.flow,
        "pipeline.stage": context.stage,
        "pipeline.fingerprint": context.fingerprint,
        "model.digest": model.digest,
        "model.fingerprint": model.fingerprint,
        "model.run_id": model.run_id,
    }
    for artifact in (model, *evidence):
        tags |= _lineage_tags(artifact.stage, artifact.output, artifact.digest, artifact.fingerprint, artifact.run_id)
    for stage, output, digest, fingerprint, run_id in _ancestors(context.environment, [model, *evidence]):
        tags |= _lineage_tags(stage, output, digest, fingerprint, run_id)
    judged = Counter(verdict.metric for artifact in (model, *evidence) for verdict in artifact.gates)
    for artifact in (model, *evidence):
        for verdict in artifact.gates:
            own = verdict.metric if judged[verdict.metric] == 1 else f"{artifact.stage}.{verdict.metric}"
            tags[f"gate.{own}"] = _verdict_text(verdict)
        tags |= {f"metric.{artifact.stage}.{name}": f"{value:.9g}" for name, value in artifact.metrics.items()}
    return tags


def _refuse_failed_gates(stage: str, artifacts: list[InputArtifact]) -> None:
    failed = [
        f"{artifact.stage}: {verdict}" for artifact in artifacts for verdict in artifact.gates if not verdict.holds
    ]
    if failed:
        raise GateError(
            f"stage {stage!r} registers nothing: {len(failed)} of the gates on its inputs do not hold: "
            + "; ".join(failed),
            hint="see the report of the run that produced them; the alias stays where it is",
        )


def _verdict_text(verdict: GateVerdict) -> str:
    shown = "missing" if verdict.value is None else f"{verdict.value:.6g}"
    return f"{shown} {verdict.comparison} {verdict.limit:.6g} {'holds' if verdict.holds else 'FAILS'}"


def _lineage_tags(stage: str, output: str, digest: str, fingerprint: str, run_id: str) -> dict[str, str]:
    return {
        f"lineage.{stage}.{output}.digest": digest,
        f"lineage.{stage}.fingerprint": fingerprint,
        f"lineage.{stage}.run_id": run_id,
    }


def _ancestors(
    environment: Mapping[str, str], artifacts: list[InputArtifact]
) -> Iterator[tuple[str, str, str, str, str]]:
    """`(stage, output, digest, fingerprint, run_id)` of what the artifacts were made from, back to the sources."""
    if "store" not in environment:
        return
    store = open_store(environment["store"])
    waiting, seen = [artifact.fingerprint for artifact in artifacts], set[str]()
    while waiting:
        fingerprint = waiting.pop()
        if fingerprint in seen:
            continue
        seen.add(fingerprint)
        commit = find_commit(store, fingerprint)
        for value in commit.inputs.values() if commit else ():
            parent = find_commit(store, value.fingerprint)
            yield value.stage, value.output, value.digest, value.fingerprint, parent.run_id if parent else "unknown"
            waiting.append(value.fingerprint)


def _source(environment: Mapping[str, str], model: InputArtifact) -> str:
    """The model's place in a remote store, or its directory in a local one."""
    url = environment.get("store", "")
    if "://" not in url or url.startswith("file://"):
        return str(model.path)
    commit = find_commit(open_store(url), model.fingerprint)
    return f"{url.rstrip('/')}/{commit.attempt_key}/{model.output}" if commit else str(model.path)


def _description(context: StageContext[RegisterModelParameters], evidence: list[InputArtifact]) -> str:
    gates = [f"- {artifact.stage}: {verdict}" for artifact in evidence for verdict in artifact.gates]
    shown = "\n".join(gates) if gates else "- none were asked for"
    return f"Registered by run {context.run_id} of flow {context.flow}.\n\nGates:\n{shown}"
