"""A project of its own for each module: a tiny model, a little real text, and the `pipeline` command."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

FLOW = """
flow: tiny
params:
  steps: 12
  learning_rate: 3e-3
  checkpoint_every_steps: 4
stages:
  data:
    uses: data.text
    with: {source: text, vocabulary_size: 512, sequence_length: 64}
  train:
    uses: train.fsdp
    with:
      dataset: ${stages.data.outputs.dataset}
      model: model.json
      steps: ${params.steps}
      learning_rate: ${params.learning_rate}
      warmup_steps: 2
      global_batch_tokens: 1024
      micro_batch_sequences: 8
      checkpoint_every_steps: ${params.checkpoint_every_steps}
      validate_every_steps: 6
      validation_sequences: 8
      log_every_steps: 1
    resources: {workers: 2, cpus: 0.5}
    retry: {max_attempts: 3, backoff_seconds: 0.1}
"""
REST = """
  flax:
    uses: convert.flax
    with: {checkpoint: "${stages.train.outputs.checkpoint}"}
  parity:
    uses: evaluate.parity
    with:
      checkpoint: ${stages.train.outputs.checkpoint}
      model: ${stages.flax.outputs.model}
      dataset: ${stages.data.outputs.dataset}
      num_sequences: 4
      num_prompts: 2
      prompt_tokens: 8
      continuation_tokens: 8
    gates:
      tensors_identical: ">= 100%"
      max_block_relative_error: "<= 1e-5"
      max_abs_logit_difference: "<= 1e-3"
      greedy_match: ">= 100%"
  quality:
    uses: evaluate.loss
    with:
      model: ${stages.flax.outputs.model}
      dataset: ${stages.data.outputs.dataset}
      num_sequences: 16
    gates: {validation_loss: "<= ${params.max_validation_loss}"}
  register:
    uses: register.model
    with:
      model: ${stages.flax.outputs.model}
      evidence: ["${stages.parity.outputs.report}", "${stages.quality.outputs.report}"]
      name: tiny
  serve:
    uses: deploy.serve
    with:
      model: ${stages.flax.outputs.model}
      registration: ${stages.register.outputs.registration}
      name: tiny
      slots: 2
      prefill_chunk_tokens: 16
      max_context_tokens: 64
"""
FULL_FLOW = FLOW.replace("\nstages:", "\n  max_validation_loss: 6.0\nstages:") + REST
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
TEXT_MODULES = ("ast", "argparse", "typing", "inspect", "dataclasses", "enum", "pathlib", "shutil", "socket", "tarfile")
COMMAND_SECONDS = 280


@dataclass
class Project:
    """One project directory."""

    root: Path

    @property
    def state(self) -> Path:
        return self.root / ".pipeline"

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "pipeline", *arguments]

    def environment(self) -> dict[str, str]:
        passed = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_AUTH", "PYTEST"))}
        return {**passed, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def run(self, *arguments: str, code: int | None = 0) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if code is not None:
            assert done.returncode == code, (
                f"{arguments}: {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
            )
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command(*arguments, "--json"),
            cwd=self.root,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def head_processes(self) -> list[psutil.Process]:
        head = json.loads((self.state / "head.json").read_text())
        root = psutil.Process(head["pid"])
        return [root, *root.children(recursive=True)]

    def find_process(self, beginning: str) -> psutil.Process:
        for process in self.head_processes():
            try:
                if " ".join(process.cmdline()).startswith(beginning):
                    return process
            except psutil.NoSuchProcess:
                continue
        raise AssertionError(f"no process {beginning!r} below the head")


def events_until(
    process: "subprocess.Popen[str]", is_reached: Callable[[dict[str, Any]], bool], *, seconds: float = 200
) -> dict[str, Any]:
    """Read a run's JSON lines until one satisfies the condition."""
    deadline = time.monotonic() + seconds
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("{"):
            event: dict[str, Any] = json.loads(line)
            if is_reached(event):
                return event
        assert time.monotonic() < deadline, "".join(lines[-20:])
    raise AssertionError("the run ended first:\n" + "".join(lines[-20:]))


def has_committed_step(step: int) -> Callable[[dict[str, Any]], bool]:
    """True for the report that the checkpoint of this step or a later one is committed."""
    return lambda event: (
        event["event"] == "report"
        and event["stage"] == "train"
        and event["kind"] == "metrics"
        and "checkpoint_commit_seconds" in event["payload"]
        and event["step"] >= step
    )


def write_project(root: Path, flow: str) -> Project:
    (root / "pyproject.toml").touch()
    (root / "flow.yaml").write_text(flow)
    (root / "model.json").write_text(json.dumps(MODEL))
    (root / "text").mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in TEXT_MODULES:
        (root / "text" / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    return Project(root=root)


def end(process: "subprocess.Popen[str]", number: int = signal.SIGKILL) -> int:
    process.send_signal(number)
    return process.wait(timeout=60)
