"""The arithmetic of memory, and the count that feeds it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rank_functions import train_recorded

from pipeline.errors import ClusterError, ParameterError
from pipeline.training.config import Ema, Lora, ParameterGroup
from pipeline.training.memory_limits import MemoryLimit
from pipeline.training.parallel.memory_estimate import (
    LIBRARIES_BYTES,
    BlockSize,
    ModelSize,
    RankPlan,
    estimate_memory,
    state_memory,
)
from pipeline.training.session import make_task
from pipeline.training.tasks.memory_check import shares_of, shortage, ways_out
from pipeline.training.tasks.memory_count import count_memory
from pipeline.training.tasks.memory_sizes import certain_of, estimate_of
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


def test_the_last_block_is_still_gathered_beside_the_logits() -> None:
    large = replace(MODEL, logits_bytes=10**9)
    found = estimate_memory(large, replace(ALONE, shard=2))
    assert found.by_kind["gathered"] == 4 * (REST.parameters + BLOCK.parameters)


def test_muon_has_one_moment_of_blocks_and_the_rest_has_those_of_adamw(make_job) -> None:
    def state(**fields) -> tuple[int, int]:
        config = make_job(**fields).config
        mesh, batch = plan_run(config, sequence_length=16, world_size=1)
        found = estimate_of(MODEL, config, mesh=mesh, batch=batch, on_gloo=True, keeps_snapshot=False)
        return found.by_kind["optimizer"], found.by_kind["average"]

    assert state() == (8 * 4500, 0)
    assert state(optimizer="muon") == (4 * 4000 + 8 * 500, 0)
    assert state(optimizer="muon", ema=Ema(decay=0.9)) == (4 * 4000 + 8 * 500, 4 * 4500)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"parallel": "ddp", "shard": 1},
        {"parallel": "zero1", "accumulation": 3},
        {"recompute": "full", "computed_bytes": 2},
        {"tensor": 2, "average_bytes": 4},
        {"pipeline": 3, "keeps_snapshot": True},
    ],
)
def test_what_is_certain_is_a_part_of_every_peak(changed) -> None:
    plan = replace(ALONE, shard=2, **changed) if "shard" not in changed else replace(ALONE, **changed)
    certain, peak = state_memory(MODEL, plan), estimate_memory(MODEL, plan)
    assert 0 < certain.peak_bytes <= peak.peak_bytes
    assert certain.by_kind["parameters"] <= peak.by_kind["parameters"]


def needs(config, *, world_size: int, **options) -> dict[tuple[str, str], int]:
    mesh, _ = plan_run(config, sequence_length=16, world_size=world_size)
    given = {"on_gloo": True, "is_drawn": False} | options
    found = certain_of(MODEL, config, mesh=mesh, **given)
    return {(need.place, need.moment.split()[0]): need.estimate.peak_bytes for need in found}


def test_certain_is_what_the_table_of_zero_says_where_it_is_held(make_job) -> None:
    def certain(world_size: int = 2, **fields) -> dict[tuple[str, str], int]:
        options = {name: fields.pop(name) for name in ("on_gloo", "is_drawn") if name in fields}
        return needs(make_job(**fields).config, world_size=world_size, **options)

    assert certain(parallel="ddp") == {("host", "in"): 16 * 4500}
    assert certain(parallel="zero1") == certain(parallel="zero3") == {("host", "in"): 8 * 4500}
    assert certain(is_drawn=True) == {("host", "in"): 8 * 4500, ("host", "while"): 4 * 4500}
    assert certain(optimizer="muon") == {("host", "in"): 6 * 4000 + 8 * 500}
    some = (ParameterGroup(match="layers", optimizer="muon"),)
    assert certain(parameter_groups=some) == certain(optimizer="muon")  # at least; all but a few may be AdamW's
    assert certain(ema=Ema(decay=0.9)) == {("host", "in"): 10 * 4500}
    assert certain(on_gloo=False) == {("device", "in"): 8 * 4500}
    on_host = certain(on_gloo=False, offload="optimizer", ema=Ema(decay=0.9))
    assert on_host == {("device", "in"): 6 * 4500, ("host", "in"): 4 * 4500}
    assert certain(on_gloo=False, offload="all", ema=Ema(decay=0.9)) == {("host", "in"): 10 * 4500}


def limit(size: int, *, key: str = "a", place: str = "host", free: int | None = None) -> MemoryLimit:
    return MemoryLimit(place=place, name=f"the memory of {key}", key=key, total_bytes=size, free_bytes=free)


def found_short(make_job, limits, **fields):
    options = {"on_gloo": fields.pop("on_gloo", True), "is_drawn": fields.pop("is_drawn", False)}
    config = make_job(**fields).config
    mesh, _ = plan_run(config, sequence_length=16, world_size=len(limits))
    large = replace(MODEL, rest=replace(REST, parameters=10 << 20, trained=10 << 20))
    shares = shares_of(limits)
    error = shortage(certain_of(large, config, mesh=mesh, **options), shares)
    return error, ways_out(large, config, mesh=mesh, shares=shares, **options)


def test_ranks_share_what_they_both_found(make_job) -> None:
    mib = 2**20
    needed = 81 * mib  # of 10 M parameters in zero3 over two ranks
    assert found_short(make_job, [[limit(2 * needed)]] * 2)[0] is None
    error, ways = found_short(make_job, [[limit(2 * needed - 4 * mib)]] * 2)
    assert isinstance(error, ParameterError)
    assert "in every update a rank holds at least 80.0 MiB of host memory:\n    parameters 20.0 MiB" in error.message
    assert "gradients 20.0 MiB\n    the memory of a: 158.0 MiB, shared by ranks 0, 1: 79.0 MiB each" in error.message
    assert "`parallel: zero3` needs 3 ranks with as much memory each" in ways
    own = limit(50 * mib, key="")
    apart, _ = found_short(make_job, [[limit(2 * needed, key="a"), own], [limit(2 * needed, key="b"), own]])
    assert [line.rpartition(", ")[2] for line in apart.message.splitlines()[-2:]] == ["of rank 0", "of rank 1"]


def test_what_would_fit_is_computed_and_not_guessed(make_job) -> None:
    mib = 2**20
    error, ways = found_short(make_job, [[limit(200 * mib)]] * 2, parallel="ddp")
    assert "at least 160.1 MiB" in error.message
    assert "`parallel: zero3` fits (80.0 MiB of a rank)" in ways
    hosts = [[limit(30 * mib, key=key)] for key in "abcdefgh"]
    error, ways = found_short(make_job, hosts, is_drawn=True, micro_batch_sequences=1)
    assert "while the whole model is made from the seed a rank holds at least 40.0 MiB" in error.message
    assert "in every update" not in error.message  # 20 MiB in eight shards
    assert "`initial` spares each rank the whole model" in ways
    devices = [[limit(100 * mib, key=key, place="device"), limit(2**40)] for key in "ab"]
    error, ways = found_short(make_job, devices, parallel="ddp", on_gloo=False)
    assert "`offload: all` fits (160.1 MiB of a rank)" in ways
    assert "`offload: optimizer` fits" in ways


def test_a_device_that_others_hold_is_no_fault_of_the_flow(make_job) -> None:
    mib = 2**20
    device = limit(200 * mib, place="device", free=150 * mib)
    error, _ = found_short(make_job, [[device], [device]], on_gloo=False)
    assert isinstance(error, ClusterError)
    assert "the memory of a: 200.0 MiB (150.0 MiB free), shared by ranks 0, 1: 100.0 MiB each" in error.message
    assert found_short(make_job, [[replace(device, free_bytes=161 * mib)]] * 2, on_gloo=False)[0] is None


def test_activations_that_may_be_too_much_are_told_at_the_first_start_alone(make_job, one_rank, monkeypatch) -> None:
    little = limit(LIBRARIES_BYTES + 300_000)
    monkeypatch.setattr("pipeline.training.tasks.memory_check.host_limits", lambda: [little])
    _, record = train_recorded(one_rank, make_job())
    (told,) = (note for note in record.notes if note.startswith("memory may be too small"))
    assert "activations" in told
    assert "libraries 500.0 MiB); the memory of a: 500.3 MiB, of rank 0; smaller `micro_batch_sequences`" in told
    _, again = train_recorded(one_rank, make_job())
    assert [note for note in again.notes if "memory" in note] == []
    monkeypatch.setattr("pipeline.training.tasks.memory_check.host_limits", lambda: [limit(2**30)])
    _, roomy = train_recorded(one_rank, make_job(steps=1, workspace=Path(make_job().workspace) / "other"))
    assert [note for note in roomy.notes if "memory" in note] == []


def test_a_training_that_cannot_fit_is_refused_before_anything_is_built(make_job, one_rank, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.training.tasks.memory_check.host_limits", lambda: [limit(2**18)])
    monkeypatch.setattr("pipeline.training.session.start_model", None)
    with pytest.raises(ParameterError, match="nothing was built") as caught:
        train_recorded(one_rank, make_job())
    assert re.search(
        r"\([\d,]{6} parameters, [\d,]{6} of them trained, over 1 ranks with parallel: zero3\)", str(caught.value)
    )


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
