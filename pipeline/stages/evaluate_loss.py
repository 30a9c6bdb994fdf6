"""`evaluate.loss`: how well the Flax model predicts held-out text.

Owns which rows are scored and how the result is reported. Knows nothing of torch or of formulas. The one decision: the
model is judged as it will be served, from the Flax artifact alone.
"""

import json
import math
from collections.abc import Sequence

from pipeline.data.packed import PackedDataset
from pipeline.errors import StageError
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


def run(context: StageContext[EvaluateLossParameters]) -> StageResult:
    """Score the validation rows of the input `dataset` with the input `model`, in float32.

    Writes `report/loss.json`: the metrics and the mean loss of every row.

    Raises:
        ParameterError: no such device, or the dataset is not in the model's language.
        ArtifactError: the model or the dataset is missing, truncated or altered.
        StageError: the loss is not finite.
    """
    given, reporter = context.parameters, context.reporter
    source = context.input("dataset")
    device, reason = choose_device(given.device)
    dataset = PackedDataset.open(source.path)
    directory = context.input("model").path
    check_language(
        dataset_vocabulary=dataset.vocabulary_size,
        model_vocabulary=int(read_config(directory)["vocab_size"]),
        dataset_tokenizer=dataset.tokenizer_path,
        model_tokenizer=directory / _TOKENIZER_FILE,
    )
    rows = spread_rows(dataset.num_rows("validation"), count=given.num_sequences)
    reporter.dataset("validation", digest=source.digest, source=source.stage, facts={"rows": len(rows)})
    batch = min(given.batch_sequences, len(rows))
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
        progress=lambda done, loss: reporter.progress(
            float(done), total=float(len(rows)), unit="rows", note=f"loss {loss:.4f}"
        ),
    )
    totals = scores.totals
    if not math.isfinite(totals.loss):
        bad = [int(row) for row, loss in zip(rows, scores.loss_by_row, strict=True) if not math.isfinite(loss)]
        raise StageError(f"stage {context.stage!r}: the loss of the Flax model is {totals.loss}; rows: {bad[:10]}")
    metrics = {
        "validation_loss": totals.loss,
        "perplexity": totals.perplexity,
        "num_tokens": float(totals.num_tokens),
    }
    reporter.figure("loss_by_position", chart=_chart(scores.loss_by_position))
    reporter.metrics(metrics)
    by_row = [{"row": int(row), "loss": loss} for row, loss in zip(rows, scores.loss_by_row, strict=True)]
    path = context.output("report") / REPORT_FILE
    path.write_text(json.dumps({"metrics": metrics, "rows": by_row}, indent=1, allow_nan=False) + "\n", "utf-8")
    return StageResult(
        metrics=metrics,
        facts={
            "device": device.platform,
            "device_reason": reason,
            "dtype": "float32",
            "num_sequences": len(rows),
            "sequence_length": dataset.sequence_length,
        },
    )


def _chart(loss_by_position: Sequence[float]) -> dict[str, object]:
    return {
        "title": "Validation loss by position",
        "kind": "lines",
        "x_label": "position",
        "y_label": "nats a token",
        "x_scale": "linear",
        "y_scale": "linear",
        "series": [{"name": "Flax", "x": list(range(len(loss_by_position))), "y": list(loss_by_position)}],
    }
