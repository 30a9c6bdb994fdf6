"""Document masks: each document of a row gets what it gets alone, tokens are counted exactly however a step is cut."""

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import TINY_MODEL
from rank_functions import Recorder, StoppedError, StoppingRows

from pipeline.data.dataset import open_for_training
from pipeline.data.document import Document
from pipeline.data.packed import PackedDataset
from pipeline.data.packing import PackingPlan, write_dataset
from pipeline.data.split import Split
from pipeline.errors import ParameterError
from pipeline.training.accumulation import accumulate, count_units
from pipeline.training.config import MeshSizes, TrainConfig
from pipeline.training.launch.spawn import free_port, spawn
from pipeline.training.loop import train
from pipeline.training.session import TrainJob, open_session
from pipeline.training.tasks.documents import check_documents
from pipeline.training.tasks.loss import IGNORED, loss_sum, to_device
from pipeline.training.tasks.model import build_model, model_config
from pipeline.training.worker import WorkerContext, joined

TIMEOUT_SECONDS = 120.0
ALONE_TOLERANCE = 2e-6
"""Logits and gradients of a masked row against the document alone, over their largest. Measured: 1.4e-7, 3.4e-7;
float32 products in another order. A document that sees another one is off by 0.1."""
CUT_TOLERANCE = 2e-6
"""Gradients (of the largest element) and loss of other cuts of a step. Measured: 5.5e-7, 4.5e-8. A mean of means would
be off by 0.01."""

READING = {"positions": True, "workers": 2, "cache_bytes": 1}


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 16 tokens with no, one or several beginnings of documents."""
    directory = tmp_path_factory.mktemp("short")
    texts = [Document(name=str(n), text=f"x{n} = {n}\n" * (1 + 7 * n % 5)) for n in range(60)]
    plan = PackingPlan(vocabulary_size=300, sequence_length=16, shard_tokens=1024, seed=0)
    write_dataset(Split(train=texts[10:], validation=texts[:10]), directory, plan=plan, source={})
    return directory


def whole_gradients(session: Any) -> dict[str, torch.Tensor]:
    return {name: item.grad.full_tensor() for name, item in session.model.named_parameters() if item.grad is not None}


def masked_step(worker: WorkerContext, job: TrainJob) -> tuple[int, float, dict[str, torch.Tensor]]:
    """Units, mean loss and gradient of the first step."""
    with joined(worker):
        session = open_session(replace(worker, store_address=None), job)
        rows = session.task.rows(0, plan=session.plan, worker=session.worker, seed=0)
        units = count_units(session, rows)
        total = accumulate(session, rows, units=units).double()
        dist.all_reduce(total)
        return units, float(total) / units, whole_gradients(session)


@dataclass
class OneRankDiffers:
    """Opens another directory on rank 1."""

    directories: tuple[Path, Path]

    def __call__(self) -> PackedDataset:
        return PackedDataset.open(self.directories[dist.get_rank()], verify=False)


def two_ranks(worker: WorkerContext, masked: TrainJob, uneven: TrainJob) -> tuple[Any, str]:
    """A masked step, and what ranks with different data are told; in one process group."""
    with joined(worker):
        inner = replace(worker, store_address=None)
        step = masked_step(inner, masked)
        with pytest.raises(ParameterError) as caught:
            open_session(inner, uneven)
        return step, str(caught.value)


def other_rows(token_rows: Path, directory: Path) -> Path:
    """The same dataset with one row fewer."""
    directory.mkdir()
    for path in token_rows.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((directory / "manifest.json").read_text())
    train_split = manifest["splits"]["train"]
    train_split["num_rows"] -= 1
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def test_each_document_of_a_row_gets_what_it_gets_alone(one_rank: WorkerContext) -> None:
    model = build_model(model_config(TINY_MODEL), seed=0)
    lengths = [5, 11, 8]
    tokens_S = torch.randint(300, (sum(lengths) + 1,), generator=torch.Generator().manual_seed(0)).int().numpy()
    places_S = np.concatenate([*(np.arange(length) for length in lengths), [0]]).astype(np.int32)
    inputs, targets_BT = to_device(tokens_S[None], one_rank, places_BS=places_S[None])
    logits_TV = model(**inputs, use_cache=False).logits[0]
    # The last token of a document has no target: what follows begins another one.
    assert (targets_BT == IGNORED).sum() == len(lengths)
    loss_sum(model, inputs, targets_BT).backward()
    together = {name: item.grad.clone() for name, item in model.named_parameters()}

    model.zero_grad()
    first = 0
    for length in lengths:
        ids_BT = torch.from_numpy(tokens_S[None, first : first + length]).long()
        alone_TV = model(input_ids=ids_BT).logits[0]
        difference = (alone_TV - logits_TV[first : first + length]).abs().max() / alone_TV.abs().max()
        assert difference < ALONE_TOLERANCE
        torch.nn.functional.cross_entropy(alone_TV[:-1], ids_BT[0, 1:], reduction="sum").backward()
        first += length
    for name, item in model.named_parameters():
        assert (item.grad - together[name]).abs().max() / item.grad.abs().max() < ALONE_TOLERANCE, name


def test_a_masked_training_counts_its_targets_across_a_resume(
    make_job, one_rank: WorkerContext, short_documents: Path, tmp_path: Path
) -> None:
    masked = functools.partial(
        make_job,
        document_masks=True,
        workspace=tmp_path / "resumed",
        open_dataset=functools.partial(open_for_training, short_documents, **READING),
    )
    with pytest.raises(StoppedError):
        train(
            one_rank,
            masked(open_dataset=functools.partial(StoppingRows, short_documents, stop_at=4)),
            reporter=Recorder(),
        )
    recorder = Recorder()
    result = train(one_rank, masked(), reporter=recorder)
    assert result.resumed_from_step == 3
    dataset = PackedDataset.open(short_documents)
    places = [dataset.train_positions(step, rows_per_step=8, rank=0, world_size=1, seed=0) for step in range(6)]
    assert result.state.units == sum(np.count_nonzero(each[:, 1:]) for each in places)
    assert recorder.series("epoch")[6] == pytest.approx(6 * 8 / dataset.num_rows("train"))
    assert all(wait >= 0 for wait in recorder.series("data_wait_seconds").values())
    assert result.state.validation["validation_loss"] < result.state.initial_validation_loss


def test_a_family_that_mixes_documents_is_refused_before_its_first_step(make_job, one_rank: WorkerContext) -> None:
    """OPT's positions are its own, and its mask knows nothing of packed rows."""
    opt = {"model_type": "opt", "vocab_size": 320, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48}
    opt |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32, "dropout": 0.0}
    with pytest.raises(ParameterError, match="a document of this model sees the one before it"):
        train(one_rank, make_job(model=opt, document_masks=True), reporter=Recorder())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model": "own:make"}, "arrays hold no documents"),
        ({"mesh": MeshSizes(context=2)}, "mesh context 2"),
        ({"mesh": MeshSizes(pipeline=2)}, "mesh pipeline 2"),
    ],
)
def test_what_does_not_go_with_documents_is_refused(fields: dict[str, Any], told: str) -> None:
    given = {"model": TINY_MODEL, "steps": 1, "micro_batch_sequences": 1, "learning_rate": 1e-3, "document_masks": True}
    with pytest.raises(ParameterError, match=told):
        check_documents(TrainConfig(**(given | fields)))


def test_tokens_are_counted_and_weighted_the_same_however_a_step_is_cut(
    make_job, one_rank: WorkerContext, short_documents: Path, tmp_path: Path
) -> None:
    """One batch, accumulation of four on one rank, of two on two ranks; and two ranks with 5 and 6 rows never wait."""
    opened = functools.partial(PackedDataset.open, short_documents)
    masked = functools.partial(make_job, document_masks=True, open_dataset=opened)
    whole = masked_step(one_rank, masked(workspace=tmp_path / "a", micro_batch_sequences=8))
    four = masked_step(replace(one_rank, store_address=f"127.0.0.1:{free_port()}"), masked(workspace=tmp_path / "b"))
    uneven = make_job(
        workspace=tmp_path / "d",
        open_dataset=OneRankDiffers((short_documents, other_rows(short_documents, tmp_path / "stale"))),
    )
    outcomes = spawn(
        two_ranks,
        masked(workspace=tmp_path / "c"),
        uneven,
        world_size=2,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    places = PackedDataset.open(short_documents).train_positions(0, rows_per_step=8, rank=0, world_size=1, seed=0)
    assert whole[0] == np.count_nonzero(places[:, 1:]) < 8 * 16
    for units, loss, gradients in (four, outcomes[0][0], outcomes[1][0]):
        assert units == whole[0]
        assert loss == pytest.approx(whole[1], rel=CUT_TOLERANCE)
        for name, gradient in gradients.items():
            assert (gradient - whole[2][name]).abs().max() / whole[2][name].abs().max() < CUT_TOLERANCE, name
    for _, told in outcomes:
        assert "ranks have opened different datasets" in told
        assert "rank 1" in told
