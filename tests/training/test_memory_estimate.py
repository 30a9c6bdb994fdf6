"""The arithmetic of memory, and the count that feeds it."""

from dataclasses import replace

import pytest

from pipeline.training.config import Ema, Lora
from pipeline.training.parallel.memory_estimate import BlockSize, ModelSize, RankPlan, estimate_memory
from pipeline.training.session import make_task
from pipeline.training.tasks.memory_count import count_memory
from pipeline.training.tasks.memory_sizes import estimate_of
from pipeline.training.tasks.model import plan_run

BLOCK = BlockSize(parameters=1000, trained=1000, saved_bytes=4000, input_bytes=400, largest_bytes=800)
REST = BlockSize(parameters=500, trained=500, saved_bytes=100, input_bytes=0, largest_bytes=0)
MODEL = ModelSize(blocks=(BLOCK,) * 4, rest=REST, logits_bytes=2000)
ALONE = RankPlan(parallel="zero3", shard=1, on_gloo=False)


def test_state_follows_the_table_of_zero() -> None:
    sharded = estimate_memory(MODEL, replace(ALONE, shard=2)).by_kind
    whole = estimate_memory(MODEL, replace(ALONE, parallel="ddp", replicate=2)).by_kind
    assert (whole["parameters"], whole["optimizer"]) == (4 * 4500, 8 * 4500)
    assert (sharded["parameters"], sharded["optimizer"]) == (2 * 4500, 4 * 4500)
    frozen = replace(MODEL, blocks=tuple(replace(block, trained=0) for block in MODEL.blocks))
    assert estimate_memory(frozen, ALONE).by_kind["optimizer"] == 8 * 500


@pytest.mark.parametrize(
    ("changed", "is_more"),
    [
        ({"keeps_snapshot": True}, True),
        ({"parallel": "zero2"}, True),
        ({"parallel": "zero1", "accumulation": 2}, True),
        ({"shard": 4}, False),
        ({"recompute": "full"}, False),
        ({"computed_bytes": 2}, False),
        ({"tensor": 2}, False),
        ({"pipeline": 2}, False),
    ],
)
def test_what_a_plan_changes_moves_the_peak(changed, is_more: bool) -> None:
    before = replace(ALONE, shard=2)
    after = estimate_memory(MODEL, replace(before, **changed)).peak_bytes
    assert (after > estimate_memory(MODEL, before).peak_bytes) == is_more


def test_the_peak_is_one_moment_and_not_the_sum_of_all_parts() -> None:
    loaded = replace(MODEL, logits_bytes=1_000_000)
    found = estimate_memory(loaded, ALONE).by_kind
    assert found["logits"] == 3_000_000
    assert found.get("gradients", 0) == 0


def test_muon_has_one_moment_of_blocks_and_the_rest_has_those_of_adamw(make_job) -> None:
    def state(**fields) -> int:
        config = make_job(**fields).config
        mesh, batch = plan_run(config, sequence_length=16, world_size=1)
        found = estimate_of(MODEL, config, mesh=mesh, batch=batch, on_gloo=True, keeps_snapshot=False)
        return found.by_kind["optimizer"]

    assert state() == 8 * 4500
    assert state(optimizer="muon") == 4 * 4000 + 8 * 500
    assert state(optimizer="muon", ema=Ema(decay=0.9)) == 8 * 4000 + 12 * 500


def test_masked_documents_are_counted_without_ranks(make_job, one_rank) -> None:
    plain, masked = (make_job(document_masks=is_masked) for is_masked in (False, True))
    sizes = []
    for job in (plain, masked):
        task, _, plan = make_task(job, world_size=1)
        sizes.append(count_memory(task, job.config, plan, worker=one_rank))
    assert sizes[1].parameters == sizes[0].parameters
    assert sizes[1].logits_bytes == sizes[0].logits_bytes


def test_a_model_is_counted_as_it_is(make_job, one_rank) -> None:
    job = make_job()
    task, _, plan = make_task(job, world_size=1)
    size = count_memory(task, job.config, plan, worker=one_rank)
    model = task.build(seed=0)
    assert size.parameters == size.trained == sum(item.numel() for item in model.parameters())
    assert [block.parameters for block in size.blocks] == [
        sum(item.numel() for item in block.parameters()) for block in task.blocks(model)
    ]
    rows, length = job.config.micro_batch_sequences, 16
    assert size.logits_bytes == 4 * rows * length * job.config.model["vocab_size"]
    assert {block.input_bytes for block in size.blocks} == {4 * rows * length * job.config.model["hidden_size"]}
    assert all(block.saved_bytes > block.largest_bytes >= block.input_bytes for block in size.blocks)
    doubled = make_job(micro_batch_sequences=4)
    twice = count_memory(task, doubled.config, replace(plan, rows_per_micro_batch=4), worker=one_rank)
    assert twice.blocks[0].saved_bytes == 2 * size.blocks[0].saved_bytes


def test_adapters_are_all_that_is_trained_and_kept(make_job, one_rank) -> None:
    plain, adapted = make_job(), make_job(lora=Lora(rank=4))
    task, _, plan = make_task(plain, world_size=1)
    whole = count_memory(task, plain.config, plan, worker=one_rank)
    size = count_memory(task, adapted.config, plan, worker=one_rank)
    assert 0 < size.trained == size.parameters - whole.parameters < whole.parameters / 2
    kept = replace(ALONE, keeps_snapshot=True, keeps_trained_only=True)
    assert estimate_memory(size, kept).by_kind["snapshot"] == 12 * size.trained
