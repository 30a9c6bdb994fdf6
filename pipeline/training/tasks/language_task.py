"""A transformers language model and packed tokens.

Owns how such a model is built from its config and what is kept with its checkpoints. Knows nothing of steps or
sharding. The one decision: a row is T next-token predictions, and a unit is a token; with document masks a row has as
many as tokens that begin no document, which are counted in each step.

Shapes: B rows, T tokens, S = T + 1.
"""

import json
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from pipeline.training.checkpoints.checkpoint import CONFIG_NAME, TOKENIZER_NAME
from pipeline.training.config import BatchPlan, TrainConfig
from pipeline.training.tasks.documents import (
    TokensAndPlaces,
    check_documents,
    prove_documents,
)
from pipeline.training.tasks.empty_model import build_empty
from pipeline.training.tasks.loss import loss_sum, to_device, validation_loss
from pipeline.training.tasks.model import blocks_of, build_model, check_fits, flops_per_token, model_config
from pipeline.training.tasks.recompute import checkpoint_options
from pipeline.training.tasks.rows import TokenRows
from pipeline.training.tasks.task import Unit
from pipeline.training.worker import WorkerContext

Rows = np.ndarray | TokensAndPlaces


class LanguageTask:
    """Next-token prediction; see `Task`."""

    unit: Unit = "token"

    def __init__(self, config: TrainConfig, dataset: TokenRows) -> None:
        """Hold the config against the dataset.

        Raises:
            ParameterError: transformers refuses the config, model and dataset do not fit, or document masks do not go
                with something else.
        """
        check_documents(config)
        assert isinstance(config.model, Mapping)
        self._config: PretrainedConfig = model_config(config.model)
        self._dataset = dataset
        self._document_masks = config.document_masks
        self._is_proved = False
        check_fits(self._config, vocabulary_size=dataset.vocabulary_size, sequence_length=dataset.sequence_length)

    @property
    def data_digest(self) -> str:
        """Of the dataset."""
        return self._dataset.digest

    @property
    def data_wait(self) -> str | None:
        """Shards that are being fetched."""
        return self._dataset.waiting_for

    @property
    def companions(self) -> Mapping[str, bytes]:
        """`config.json` and `tokenizer.json`."""
        text = json.dumps(self._config.to_dict(), indent=2, sort_keys=True) + "\n"
        return {CONFIG_NAME: text.encode(), TOKENIZER_NAME: self._dataset.tokenizer_path.read_bytes()}

    def build(self, *, seed: int) -> nn.Module:
        """The model in float32."""
        return build_model(self._config, seed=seed)

    def build_empty(self, *, seed: int) -> nn.Module:
        """The model with its parameters on the meta device."""
        return build_empty(self._config)

    def prepare(self, model: nn.Module, config: TrainConfig) -> None:
        """Recompute each block in the backward pass where the config says so."""
        if config.activation_checkpointing != "none":
            options = checkpoint_options(config.activation_checkpointing)
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The decoder blocks."""
        return blocks_of(model)

    def flops_per_unit(self, num_parameters: int) -> float | None:
        """Of one token."""
        return flops_per_token(
            self._config, num_parameters=num_parameters, sequence_length=self._dataset.sequence_length
        )

    def rows(self, step: int, *, plan: BatchPlan, worker: WorkerContext, seed: int) -> Rows:
        """int32 [B, T + 1]; with document masks the same as `tokens`, and their `places`."""
        share = worker.share
        asked = {"rows_per_step": plan.rows_per_step, "rank": share.rank, "world_size": share.num_ranks, "seed": seed}
        tokens_BS = self._dataset.train_rows(step, **asked)
        if not self._document_masks:
            return tokens_BS
        return {"tokens": tokens_BS, "places": self._dataset.train_positions(step, **asked)}

    def num_units(self, rows: Rows) -> int | None:
        """Targets that count, where documents are masked."""
        return int((rows["places"][:, 1:] != 0).sum()) if isinstance(rows, Mapping) else None

    def step_rows(self, step: int, *, plan: BatchPlan, seed: int) -> Mapping[str, list[int]]:
        """See `Task.step_rows`."""
        return self._dataset.step_rows(step, rows_per_step=plan.rows_per_step, seed=seed)

    def epochs(self, step: int, *, plan: BatchPlan, seed: int) -> Mapping[str, float]:
        """`epoch`, or `epoch_NAME` of each dataset of a mixture."""
        return self._dataset.epochs(step, rows_per_step=plan.rows_per_step, seed=seed)

    def loss_sum(self, model: nn.Module, rows: Rows, part: slice, worker: WorkerContext) -> torch.Tensor:
        """Cross entropy over all targets of the rows.

        Raises:
            ParameterError: documents are masked, and this is the first pass of a model that mixes them.
        """
        if not isinstance(rows, Mapping):
            return loss_sum(model, *to_device(rows[part], worker))
        tokens_BS, places_BS = rows["tokens"][part], rows["places"][part]
        if not self._is_proved and dist.is_initialized():  # all ranks prove it together; what is counted has none
            length = self._dataset.sequence_length
            prove_documents(
                model,
                worker,
                num_rows=len(tokens_BS),
                length=length,
                vocabulary=self._config.vocab_size,
            )
            self._is_proved = True
        return loss_sum(model, *to_device(tokens_BS, worker, places_BS=places_BS))

    def settle(self, model: nn.Module, worker: WorkerContext) -> None:
        """Nothing: buffers of these models are constants."""

    def validate(
        self, model: nn.Module, worker: WorkerContext, *, max_rows: int, micro_batch_rows: int
    ) -> dict[str, float]:
        """`validation_loss`, nats a token."""
        loss = validation_loss(
            model,
            self._dataset,
            worker,
            max_rows=max_rows,
            micro_batch_rows=micro_batch_rows,
            document_masks=self._document_masks,
        )
        return {"validation_loss": loss}
