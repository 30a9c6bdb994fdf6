"""`evaluate.parity`: prove that the torch checkpoint and the Flax model compute the same.

Owns which rows and prompts are compared and how the result is reported. Knows nothing of rules, formats or formulas.
The one decision: both models run in float32 on the CPU, where neither framework rounds its products, so what is
measured is the conversion and not a device.
"""

import json
from dataclasses import asdict
from typing import Any

from converters.parity import TensorAgreement, compare_tensors, load_pair
from pipeline.data.packed import PackedDataset
from pipeline.errors import ParameterError, StageError
from pipeline.evaluation.comparison import Comparison, charts, compare, rows_per_batch
from pipeline.evaluation.flax_predictor import FlaxPredictor, choose_device
from pipeline.evaluation.held_out import check_language, spread_rows
from pipeline.evaluation.torch_predictor import TorchPredictor
from pipeline.stages.parameters import EvaluateParityParameters
from pipeline.stages.protocol import StageContext, StageResult

REPORT_FILE = "parity.json"
_TOKENIZER_FILE = "tokenizer.json"


def run(context: StageContext[EvaluateParityParameters]) -> StageResult:
    """Compare the inputs `checkpoint` and `model` on the held-out rows of `dataset`.

    Writes `report/parity.json`: the metrics, the numbers of every row, every continuation, and the tensors.

    Raises:
        ParameterError: prompts do not fit the rows or the model, or the dataset has another vocabulary.
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: the model or the dataset is.
        ConversionError: checkpoint and model are not of one config.
        StageError: a model gives logits that are not finite.
    """
    given, reporter = context.parameters, context.reporter
    checkpoint, model = context.input("checkpoint").path, context.input("model").path
    dataset = PackedDataset.open(context.input("dataset").path)
    tensors = compare_tensors(checkpoint, model=model)
    pair = load_pair(checkpoint, model=model)
    _check(given, dataset=dataset, config=pair.config)
    check_language(
        dataset_vocabulary=dataset.vocabulary_size,
        model_vocabulary=int(pair.config["vocab_size"]),
        dataset_tokenizer=dataset.tokenizer_path,
        model_tokenizer=model / _TOKENIZER_FILE,
    )
    rows = spread_rows(dataset.num_rows("validation"), count=given.num_sequences)
    prompt_rows = spread_rows(dataset.num_rows("validation"), count=given.num_prompts)
    batch = min(len(rows), rows_per_batch(dataset.sequence_length, vocabulary=int(pair.config["vocab_size"])))
    candidate = FlaxPredictor(pair.candidate, device=choose_device("cpu")[0], batch_sequences=batch)
    try:
        comparison = compare(
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
        raise StageError(
            f"stage {context.stage!r}: torch is the reference, Flax the candidate; {error}",
            hint="look for damaged weights in the training metrics, or for a wrong rule in the conversion record",
        ) from error
    _report(context, comparison, tensors)
    return StageResult(
        metrics=comparison.metrics,
        facts={
            "device": "cpu",
            "device_reason": "parity is measured in float32 on the CPU on both sides",
            "num_sequences": len(rows),
            "sequence_length": dataset.sequence_length,
            "num_prompts": len(prompt_rows),
            "tensors_identical": f"{tensors.num_identical} of {tensors.num_tensors}",
            "tensors_rounded_by_cast": len(tensors.rounded),
            "tensors_differing": list(tensors.differing),
        },
    )


def _check(given: EvaluateParityParameters, *, dataset: PackedDataset, config: Any) -> None:
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


def _report(context: StageContext[EvaluateParityParameters], comparison: Comparison, tensors: TensorAgreement) -> None:
    reporter = context.reporter
    dataset = context.input("dataset")
    reporter.dataset(
        "validation", digest=dataset.digest, source=dataset.stage, facts={"rows": len(comparison.sequences)}
    )
    for name, chart in charts(comparison, reference="torch", candidate="Flax").items():
        reporter.figure(name, chart=chart)
    reporter.metrics(comparison.metrics)
    reporter.note(
        f"{tensors.num_identical} of {tensors.num_tensors} tensors come back bit for bit; largest logit difference "
        f"{comparison.metrics['max_abs_logit_difference']:.2e}, greedy match {comparison.metrics['greedy_match']:.1%}"
    )
    report = {
        "metrics": comparison.metrics,
        "tensors": asdict(tensors),
        "sequences": [asdict(row) for row in comparison.sequences],
        "continuations": [asdict(continuation) for continuation in comparison.continuations],
        "max_abs_by_position": comparison.max_abs_by_position,
    }
    path = context.output("report") / REPORT_FILE
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
