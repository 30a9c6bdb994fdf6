"""`evaluate.parity`: prove that the torch checkpoint and the Flax model compute the same.

Owns which inputs are compared and how the result is reported. Knows nothing of rules, formats or formulas. The one
decision: both models run in float32 on the CPU, where neither framework rounds its products, so what is measured is the
conversion and not a device.
"""

import json
from dataclasses import asdict
from typing import Any

from converters.model_pair import ModelPair, load_pair
from converters.parity import compare_pair
from converters.parity_report import REPORT_FILE, ParityLimits, ParityReport
from converters.parity_tensors import compare_tensors
from pipeline.data.dataset import TokenDataset, open_tokens
from pipeline.errors import ParameterError, StageError
from pipeline.evaluation.comparison import Comparison, charts, compare, rows_per_batch
from pipeline.evaluation.flax_predictor import FlaxPredictor, choose_device
from pipeline.evaluation.held_out import check_language, spread_rows
from pipeline.evaluation.torch_predictor import TorchPredictor
from pipeline.models.description import ModelKind
from pipeline.stages.parameters import EvaluateParityParameters
from pipeline.stages.protocol import StageContext, StageResult

_TOKENIZER_FILE = "tokenizer.json"
_DATASET = "dataset"


def run(context: StageContext[EvaluateParityParameters]) -> StageResult:
    """Compare the inputs `checkpoint` and `model`: tensors, blocks, outputs; on the rows of `dataset` where given.

    Writes `report/parity.json`: the metrics, every level, and of text rows the numbers of every row.

    Raises:
        ParameterError: prompts do not fit the rows or the model, or the dataset has another vocabulary.
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: the model or the dataset is.
        ConversionError: checkpoint and model are not of one config.
        StageError: a model gives values that are not finite.
    """
    given, reporter = context.parameters, context.reporter
    checkpoint, model = context.input("checkpoint").path, context.input("model").path
    tensors = compare_tensors(checkpoint, model=model)
    pair = load_pair(checkpoint, model=model, project_root=context.project_root)
    has_text = _DATASET in context.inputs
    text = _compare_text(context, pair) if has_text else None
    report = compare_pair(
        pair,
        tensors=tensors,
        limits=ParityLimits(block_relative_error=given.block_limit),
        continued_tokens=0 if has_text else given.continuation_tokens,
        progress=lambda done, total, note: reporter.progress(float(done), total=float(total), unit="levels", note=note),
    )
    _refuse_not_finite(report, stage=context.stage)
    metrics = {**report.metrics, **(text.metrics if text else {})}
    _tell(context, report, text=text, metrics=metrics)
    first = report.first_block_over_limit
    return StageResult(
        metrics=metrics,
        facts={
            "device": "cpu",
            "device_reason": "parity is measured in float32 on the CPU on both sides",
            "kind": report.kind,
            "road": report.road,
            "inputs": dict(report.inputs),
            "num_sequences": len(text.sequences) if text else 0,
            "num_blocks": len(report.blocks),
            "first_block_over_limit": first.name if first else None,
            "tensors_compared": tensors.num_tensors,
            "tensors_rounded_by_cast": len(tensors.rounded),
            "tensors_differing": list(tensors.differing),
            "failures": list(report.failures),
        },
    )


def _compare_text(context: StageContext[EvaluateParityParameters], pair: ModelPair) -> Comparison:
    """Both models on held-out rows of the input `dataset`."""
    given, reporter = context.parameters, context.reporter
    if pair.description.kind is not ModelKind.CAUSAL_LM:
        raise ParameterError(
            f"stage {context.stage!r}: rows of text are compared for a {ModelKind.CAUSAL_LM} model, this one "
            f"({pair.description.name}) is {pair.description.kind}",
            hint="leave dataset out: random inputs of the model's own description are compared then",
        )
    dataset = open_tokens(context.input(_DATASET).path)
    vocabulary = int(pair.config["vocab_size"])
    _check(given, dataset=dataset, config=pair.config)
    check_language(
        dataset_vocabulary=dataset.vocabulary_size,
        model_vocabulary=vocabulary,
        dataset_tokenizer=dataset.tokenizer_path,
        model_tokenizer=pair.model / _TOKENIZER_FILE,
    )
    rows = spread_rows(dataset.num_rows("validation"), count=given.num_sequences)
    prompt_rows = spread_rows(dataset.num_rows("validation"), count=given.num_prompts)
    batch = min(len(rows), rows_per_batch(dataset.sequence_length, vocabulary=vocabulary))
    device, _ = choose_device("cpu")
    candidate = FlaxPredictor(pair.candidate, description=pair.description, device=device, batch_sequences=batch)
    try:
        return compare(
            TorchPredictor(pair.reference),
            candidate,
            tokens_BT=dataset.rows("validation", rows)[:, :-1],
            rows=rows,
            prompts_BP=dataset.rows("validation", prompt_rows)[:, : given.prompt_tokens],
            num_tokens=given.continuation_tokens,
            rows_per_batch=batch,
            progress=lambda done, total, note: reporter.progress(
                float(done), total=float(total), unit="batches", note=note
            ),
        )
    except ValueError as error:
        raise _not_finite(context.stage, str(error)) from error


def _check(given: EvaluateParityParameters, *, dataset: TokenDataset, config: Any) -> None:
    """Hold lengths against the rows and the model.

    Raises:
        ParameterError: something is too long; lists all.
    """
    complaints = []
    limit = int(config.get("max_position_embeddings", 2**31))
    if given.prompt_tokens > dataset.sequence_length:
        complaints.append(
            f"prompt_tokens {given.prompt_tokens} exceeds the dataset's rows of {dataset.sequence_length}"
        )
    if given.prompt_tokens + given.continuation_tokens > limit:
        complaints.append(
            f"prompt_tokens {given.prompt_tokens} + continuation_tokens {given.continuation_tokens} exceeds the "
            f"model's max_position_embeddings {limit}"
        )
    if complaints:
        raise ParameterError("; ".join(complaints))


def _refuse_not_finite(report: ParityReport, *, stage: str) -> None:
    """A gate on a number needs a number.

    Raises:
        StageError: an output or a block is not finite; names the first.
    """
    named = [(block.name, block.max_relative) for block in report.blocks]
    named += [(output.name, output.max_relative) for output in report.outputs]
    first = next((name for name, error in named if error == float("inf")), None)
    if first is not None:
        raise _not_finite(stage, f"{first} is not finite on one side, or zero in torch alone")


def _not_finite(stage: str, what: str) -> StageError:
    return StageError(
        f"stage {stage!r}: torch is the reference, Flax the candidate; {what}",
        hint="look for damaged weights in the training metrics, or for a wrong rule in the conversion record",
    )


def _tell(
    context: StageContext[EvaluateParityParameters],
    report: ParityReport,
    *,
    text: Comparison | None,
    metrics: dict[str, float],
) -> None:
    reporter, tensors = context.reporter, report.tensors
    for name, chart in report.charts().items():
        reporter.figure(name, chart=chart)
    reporter.metrics(metrics)
    reporter.note(
        f"{tensors.num_identical} of {tensors.num_tensors} tensors come back bit for bit; {len(report.blocks)} blocks, "
        f"largest relative error {report.max_block_relative_error:.2e}; outputs "
        f"{metrics['max_rel_output_difference']:.2e}"
        + (f"; greedy match {metrics['greedy_match']:.1%}" if "greedy_match" in metrics else "")
    )
    for failure in report.failures:
        reporter.note(failure)
    value = {**report.to_json(), "metrics": metrics}
    if text is not None:
        dataset = context.input(_DATASET)
        reporter.dataset("validation", digest=dataset.digest, source=dataset.stage, facts={"rows": len(text.sequences)})
        for name, chart in charts(text, reference="torch", candidate="Flax").items():
            reporter.figure(name, chart=chart)
        value["sequences"] = [asdict(row) for row in text.sequences]
        value["continuations"] = [asdict(continuation) for continuation in text.continuations]
        value["max_abs_by_position"] = text.max_abs_by_position
    path = context.output("report") / REPORT_FILE
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
