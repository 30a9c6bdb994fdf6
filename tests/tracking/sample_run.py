"""Runs as the report and the trackers see them, for the tests of this folder."""

import math
import random
from dataclasses import replace

from pipeline.spec.gate import Gate
from pipeline.tracking.view import AttemptView, RunStatus, RunView, SeriesPoint, StageStatus, StageView

START = 1_767_225_600.0
RUN_ID = "20260101-000000-llm-3f9a"
FLOW_TEXT = "name: llm\nparams:\n  steps: 300\nstages:\n  data: {uses: data.text}\n  train: {uses: train.fsdp}\n"


def attempt(start, seconds, *, number=1, status=StageStatus.DONE, failure_class=None, error=None):
    return AttemptView(
        attempt=number,
        started_at=START + start,
        ended_at=None if seconds is None else START + start + seconds,
        status=status,
        failure_class=failure_class,
        error=error,
    )


def digest_like(seed):
    return random.Random(seed).randbytes(32).hex()


def training_series(*, num_steps=300, every=5):
    rng = random.Random(0)
    loss, rate, norm, speed, validation = [], [], [], [], []
    for step in range(every, num_steps + 1, every):
        at = START + 20 + step * 0.3
        value = 3.1 + 5.3 * math.exp(-step / 45) + rng.gauss(0, 0.05)
        loss.append(SeriesPoint(step=step, value=value, time=at))
        peak = 1e-3 * min(1.0, step / 20)
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / num_steps)
        rate.append(SeriesPoint(step=step, value=peak * (cosine if step > 20 else 1), time=at))
        norm.append(SeriesPoint(step=step, value=0.8 + 3 * math.exp(-step / 30) + abs(rng.gauss(0, 0.1)), time=at))
        speed.append(SeriesPoint(step=step, value=21_000 + rng.gauss(0, 600), time=at))
        if step % 50 == 0:
            validation.append(SeriesPoint(step=step, value=3.2 + 5.2 * math.exp(-step / 45), time=at))
    return {
        "loss": loss,
        "validation_loss": validation,
        "learning_rate": rate,
        "gradient_norm": norm,
        "tokens_per_second": speed,
    }


def parity_figures():
    rng = random.Random(1)
    torch_logits = [rng.gauss(0, 4) for _ in range(600)]
    flax_logits = [value + rng.gauss(0, 2e-6) for value in torch_logits]
    return {
        "logits": {
            "title": "torch and Flax logits",
            "kind": "scatter",
            "x_label": "torch logit",
            "y_label": "Flax logit",
            "x_scale": "linear",
            "y_scale": "linear",
            "series": [{"name": "logits", "x": torch_logits, "y": flax_logits}],
        },
        "differences": {
            "title": "absolute logit difference by position",
            "kind": "lines",
            "x_label": "position",
            "y_label": "|torch - Flax|",
            "x_scale": "linear",
            "y_scale": "log",
            "series": [
                {"name": "largest", "x": list(range(256)), "y": [9e-6 + rng.random() * 4e-6 for _ in range(256)]},
                {"name": "mean", "x": list(range(256)), "y": [8e-7 + rng.random() * 2e-7 for _ in range(256)]},
            ],
        },
    }


def llm_run(*, status=RunStatus.DONE):
    """The flow of the README: seven stages, one of them retried."""
    parity = {"max_abs_logit_difference": 1.24e-5, "mean_kl": 3.1e-9, "top1_agreement": 1.0, "greedy_match": 1.0}
    stages = (
        StageView(
            name="data",
            kind="data.text",
            status=StageStatus.REUSED,
            reason="committed by run 20251231-220000-llm-77aa with the same fingerprint; 6 files verify",
            fingerprint=digest_like("data"),
            producer_run_id="20251231-220000-llm-77aa",
            metrics={"num_documents": 1632, "num_train_tokens": 3_412_480, "bytes_per_token": 3.87},
            digests={"dataset": digest_like("dataset")},
        ),
        StageView(
            name="train",
            kind="train.fsdp",
            status=StageStatus.DONE,
            reason="parameter steps changed: 200 -> 300",
            needs=("data",),
            fingerprint=digest_like("train"),
            producer_run_id=RUN_ID,
            attempts=(
                attempt(
                    4,
                    31,
                    status=StageStatus.FAILED,
                    failure_class="infra",
                    error="rank 1 ended with signal 9 (SIGKILL) at step 60\n  hint: the attempt resumes from step 50",
                ),
                attempt(36, 84, number=2),
            ),
            metrics={
                "train_loss": 3.108,
                "validation_loss": 3.2066,
                "initial_validation_loss": 8.417,
                "tokens_per_second": 21_240.4,
                "num_parameters": 8_131_840,
                "resumed_from_step": 50,
            },
            facts={"device": "cpu", "device_reason": "auto: no worker has a GPU", "backend": "gloo", "world_size": 2},
            series=training_series(),
            digests={"checkpoint": digest_like("checkpoint")},
        ),
        StageView(
            name="flax",
            kind="convert.flax",
            status=StageStatus.DONE,
            reason="input checkpoint changed",
            needs=("train",),
            fingerprint=digest_like("flax"),
            producer_run_id=RUN_ID,
            attempts=(attempt(120.5, 9.2),),
            metrics={"num_source_tensors": 74, "num_target_leaves": 74, "num_bytes": 32_527_360},
            digests={"model": digest_like("model")},
        ),
        StageView(
            name="parity",
            kind="evaluate.parity",
            status=StageStatus.DONE,
            reason="input model changed",
            needs=("train", "flax", "data"),
            fingerprint=digest_like("parity"),
            producer_run_id=RUN_ID,
            attempts=(attempt(130, 18.4),),
            metrics=parity,
            gates=(
                Gate.parse("max_abs_logit_difference", "<= 1e-3").judge(parity),
                Gate.parse("greedy_match", ">= 100%").judge(parity),
            ),
            figures=parity_figures(),
            digests={"report": digest_like("parity-report")},
        ),
        StageView(
            name="quality",
            kind="evaluate.loss",
            status=StageStatus.DONE,
            reason="input model changed",
            needs=("flax", "data"),
            fingerprint=digest_like("quality"),
            producer_run_id=RUN_ID,
            attempts=(attempt(130, 11.1),),
            metrics={"validation_loss": 3.2071, "perplexity": 24.71, "num_tokens": 32_640},
            gates=(Gate.parse("validation_loss", "<= 5.5").judge({"validation_loss": 3.2071}),),
            digests={"report": digest_like("quality-report")},
        ),
        StageView(
            name="register",
            kind="register.model",
            status=StageStatus.DONE,
            reason="input evidence changed",
            needs=("flax", "parity", "quality"),
            fingerprint=digest_like("register"),
            producer_run_id=RUN_ID,
            attempts=(attempt(149, 0.31),),
            metrics={"version": 4.0},
            facts={"name": "stdlib-llama", "alias": "champion", "uri": "models:/stdlib-llama/4"},
            digests={"registration": digest_like("registration")},
        ),
        StageView(
            name="serve",
            kind="deploy.serve",
            status=StageStatus.DONE,
            reason="input model changed",
            needs=("flax", "register"),
            fingerprint=digest_like("serve"),
            producer_run_id=RUN_ID,
            attempts=(attempt(149.5, 27.3),),
            metrics={"ready_seconds": 25.9, "smoke_seconds": 0.21},
            facts={"url": "http://127.0.0.1:8000/v1", "replicas": 1},
            digests={"deployment": digest_like("deployment")},
        ),
    )
    return RunView(
        run_id=RUN_ID,
        flow="llm",
        flow_file="flows/llm.yaml",
        status=status,
        started_at=START,
        ended_at=START + 177.4,
        parameters={"steps": 300, "learning_rate": 0.001, "model": "configs/models/llama-8m.json", "vocabulary": 4096},
        stages=stages,
        host="workstation",
        user="ada",
        flow_text=FLOW_TEXT,
    )


def failed_run():
    """The gate of parity fails; what depends on it is skipped."""
    run = llm_run(status=RunStatus.FAILED)
    metrics = {"max_abs_logit_difference": 0.81, "greedy_match": float("nan")}
    stages = []
    for stage in run.stages:
        if stage.name == "parity":
            stages.append(
                replace(
                    stage,
                    status=StageStatus.FAILED,
                    metrics=metrics,
                    gates=tuple(
                        Gate.parse(name, condition).judge(metrics)
                        for name, condition in (
                            ("max_abs_logit_difference", "<= 1e-3"),
                            ("greedy_match", ">= 100%"),
                            ("top1_agreement", ">= 99%"),
                        )
                    ),
                    attempts=(
                        attempt(
                            130,
                            18.4,
                            status=StageStatus.FAILED,
                            failure_class="gate",
                            error="max_abs_logit_difference = 0.81 FAILS <= 0.001",
                        ),
                    ),
                )
            )
        elif stage.name in ("register", "serve"):
            skipped = replace(stage, status=StageStatus.SKIPPED, reason="parity failed", attempts=(), metrics={})
            stages.append(replace(skipped, facts={}, digests={}, fingerprint=None, producer_run_id=None))
        else:
            stages.append(stage)
    return replace(
        run,
        stages=tuple(stages),
        error="stage parity: max_abs_logit_difference = 0.81 FAILS <= 0.001",
        ended_at=START + 149,
        tracking_gap=3,
    )


def wide_run(*, num_stages=30):
    """Thirty stages with long names, fan-out and fan-in."""
    stages = []
    for index in range(num_stages):
        needs = [
            f"stage-{parent}-with-a-rather-long-name-that-goes-on"
            for parent in {index // 3, index // 2}
            if parent < index
        ]
        stages.append(
            StageView(
                name=f"stage-{index}-with-a-rather-long-name-that-goes-on",
                kind="python.call",
                status=(StageStatus.DONE, StageStatus.REUSED, StageStatus.RUNNING, StageStatus.PENDING)[index % 4],
                reason="first run",
                needs=tuple(needs),
                fingerprint=digest_like(index),
                attempts=(attempt(3 * index, 5),)
                if index % 4 == 0
                else (attempt(3 * index, None, status=StageStatus.RUNNING),)
                if index % 4 == 2
                else (),
                metrics={f"metric_{n}": 10.0 ** (n - 6) * 1.23456 for n in range(12)},
                gates=(Gate.parse("metric_0", "<= 1").judge({"metric_0": 0.1}),),
            )
        )
    return replace(
        llm_run(status=RunStatus.RUNNING),
        flow="a-flow-" + "x" * 120,
        stages=tuple(stages),
        ended_at=None,
        parameters={},
    )
