"""`evaluate.loss`: how well the Flax model predicts what was held out.

Owns which rows are scored and how the result is reported, for rows of tokens and for arrays. Knows nothing of torch or
of formulas. The one decision: the model is judged as it will be served, from the Flax artifact alone.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from numpy.typing import NDArray

from pipeline.data.arrays import ArrayDataset
from pipeline.data.dataset import TokenDataset, open_dataset
from pipeline.errors import ParameterError, StageError
from pipeline.evaluation.array_scoring import ArrayScores, score_arrays
from pipeline.evaluation.flax_arrays import FlaxArrays
from pipeline.evaluation.flax_predictor import FlaxPredictor, choose_device
from pipeline.evaluation.held_out import check_language, spread_rows
from pipeline.evaluation.scoring import score
from pipeline.models.checkpoint import load_model
from pipeline.models.config_file import read_config
from pipeline.models.registry import describe
from pipeline.stages.parameters import EvaluateLossParameters
from pipeline.stages.protocol import StageContext, StageResult

REPORT_FILE = "loss.json"
_TOKENIZER_FILE = "tokenizer.json"
Context = StageContext[EvaluateLossParameters]


def run(context: Context) -> StageResult:
    """Score the validation rows of the input `dataset` with the input `model`, in float32.

    Writes `report/loss.json`: the metrics and the mean loss of every row.

    Raises:
        ParameterError: no such device, the dataset is not in the model's language, or its arrays are not the model's
            inputs.
        ArtifactError: the model or the dataset is missing, truncated or altered.
        StageError: the loss is not finite.
    """
    source = context.input("dataset")
    device, reason = choose_device(context.parameters.device)
    dataset = open_dataset(source.path)
    rows = spread_rows(dataset.num_rows("validation"), count=context.parameters.num_sequences)
    context.reporter.dataset("validation", digest=source.digest, source=source.stage, facts={"rows": len(rows)})
    if isinstance(dataset, ArrayDataset):
        metrics, by_row, facts = _score_arrays(context, dataset, rows=rows, device=device)
    else:
        metrics, by_row, facts = _score_text(context, dataset, rows=rows, device=device)
    if not math.isfinite(metrics["validation_loss"]):
        bad = [int(row) for row, loss in zip(rows, by_row, strict=True) if not math.isfinite(loss)]
        raise StageError(
            f"stage {context.stage!r}: the loss of the Flax model is {metrics['validation_loss']}; rows: {bad[:10]}"
        )
    context.reporter.metrics(metrics)
    listed = [{"row": int(row), "loss": loss} for row, loss in zip(rows, by_row, strict=True)]
    path = context.output("report") / REPORT_FILE
    path.write_text(json.dumps({"metrics": metrics, "rows": listed}, indent=1, allow_nan=False) + "\n", "utf-8")
    return StageResult(
        metrics=metrics,
        facts={
            "device": device.platform,
            "device_reason": reason,
            "dtype": "float32",
            "num_sequences": len(rows),
            **facts,
        },
    )


def _score_text(
    context: Context, dataset: TokenDataset, *, rows: NDArray[Any], device: jax.Device
) -> tuple[dict[str, float], Sequence[float], dict[str, Any]]:
    directory = context.input("model").path
    check_language(
        dataset_vocabulary=dataset.vocabulary_size,
        model_vocabulary=int(read_config(directory)["vocab_size"]),
        dataset_tokenizer=dataset.tokenizer_path,
        model_tokenizer=directory / _TOKENIZER_FILE,
    )
    batch = min(context.parameters.batch_sequences, len(rows))
    predictor = FlaxPredictor(
        load_model(directory, dtype="float32"),
        description=describe(directory),
        device=device,
        batch_sequences=batch,
    )
    scores = score(
        predictor,
        read=lambda indices: dataset.rows("validation", indices),
        rows=rows,
        batch_sequences=batch,
        progress=lambda done, loss: _progress(context, done, loss, total=len(rows)),
    )
    metrics = {
        "validation_loss": scores.totals.loss,
        "perplexity": scores.totals.perplexity,
        "num_tokens": float(scores.totals.num_tokens),
    }
    context.reporter.figure("loss_by_position", chart=_position_chart(scores.loss_by_position))
    return metrics, scores.loss_by_row, {"sequence_length": dataset.sequence_length}


def _score_arrays(
    context: Context, dataset: ArrayDataset, *, rows: NDArray[Any], device: jax.Device
) -> tuple[dict[str, float], Sequence[float], dict[str, Any]]:
    directory = context.input("model").path
    description = describe(directory)
    wanted = sorted(description.example_inputs(seed=0))
    if wanted != sorted(dataset.inputs):
        raise ParameterError(
            f"the model takes {', '.join(wanted)}; the dataset has {', '.join(sorted(dataset.inputs))} (and the "
            f"target {dataset.target})",
            hint="evaluate on the dataset that the model was trained on, or on one with the same names",
        )
    batch = min(context.parameters.batch_sequences, len(rows))
    model = FlaxArrays(description, load_model(directory, dtype="float32"), device=device, batch_rows=batch)
    try:
        scores = score_arrays(
            model.predict,
            read=lambda indices: dataset.rows("validation", indices),
            rows=rows,
            target=dataset.target,
            num_classes=dataset.num_classes,
            batch_rows=batch,
            progress=lambda done, loss: _progress(context, done, loss, total=len(rows)),
        )
    except ValueError as error:
        raise ParameterError(f"stage {context.stage!r}: model and dataset do not fit: {error}") from error
    metrics = {"validation_loss": scores.loss, "num_examples": float(len(rows))}
    if scores.accuracy is not None:
        metrics["validation_accuracy"] = scores.accuracy
        context.reporter.figure("accuracy_by_class", chart=_class_chart(scores))
    return metrics, scores.losses, {"target": dataset.target}


def _progress(context: Context, done: int, loss: float, *, total: int) -> None:
    context.reporter.progress(float(done), total=float(total), unit="rows", note=f"loss {loss:.4f}")


def _position_chart(loss_by_position: Sequence[float]) -> dict[str, object]:
    series = {"name": "Flax", "x": list(range(len(loss_by_position))), "y": list(loss_by_position)}
    words = {"title": "Validation loss by position", "x_label": "position", "y_label": "nats a token"}
    return _chart("lines", words, [series])


def _class_chart(scores: ArrayScores) -> dict[str, object]:
    confusion = scores.confusion
    assert confusion is not None
    counts = confusion.sum(axis=1)
    shown = [index for index in range(len(counts)) if counts[index]]
    right = [float(confusion[index, index] / counts[index]) for index in shown]
    words = {"title": "Share of each class that is recognised", "x_label": "class", "y_label": "share"}
    return _chart("bars", words, [{"name": "Flax", "x": shown, "y": right}])


def _chart(kind: str, words: Mapping[str, str], series: Sequence[Mapping[str, object]]) -> dict[str, object]:
    return {**words, "kind": kind, "x_scale": "linear", "y_scale": "linear", "series": list(series)}
