"""Which meshes a run can have, where ranks stand on them, and which blocks and tokens are whose: all by arithmetic."""

import itertools

import pytest
import torch
from conftest import TINY_MODEL
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ParameterError
from pipeline.training.config import Lora, MeshSizes, TrainConfig
from pipeline.training.parallel.axes import ModelShape, plan_axes
from pipeline.training.parallel.context import positions_of
from pipeline.training.parallel.mesh import MeshPlan, plan_mesh
from pipeline.training.parallel.pipeline import blocks_of_stages, check_stages
from pipeline.training.parallel.placement import place
from pipeline.training.tasks.empty_model import build_empty
from pipeline.training.tasks.model import model_config, shape_of
from pipeline.training.worker import DataShare

SHAPE = ModelShape(
    model_type="llama",
    num_layers=6,
    num_heads=12,
    num_key_value_heads=4,
    intermediate_size=96,
    vocab_size=320,
    sliding_window=None,
)


def plan(*, world_size: int = 8, sequence_length: int = 32, shape: ModelShape | None = SHAPE, **fields):
    given_fields = {
        "model": {},
        "steps": 1,
        "micro_batch_sequences": 2,
        "learning_rate": 1e-3,
        "global_batch_tokens": 32 * 64,
    }
    config = TrainConfig(**(given_fields | fields))
    return plan_axes(config, world_size=world_size, sequence_length=sequence_length, shape=shape)


def refusal(**fields) -> ParameterError:
    with pytest.raises(ParameterError) as caught:
        plan(**fields)
    assert caught.value.exit_code == 2
    return caught.value


def test_a_rank_of_a_pipeline_that_would_train_nothing_is_named_with_its_blocks() -> None:
    """Four blocks on two ranks; the embedding is tied, so both have it."""
    model = build_empty(model_config(TINY_MODEL | {"num_hidden_layers": 4}))

    def check(*freeze: str, **sizes) -> None:
        given = {"model": {}, "steps": 1, "micro_batch_sequences": 2, "learning_rate": 1e-3}
        check_stages(model, TrainConfig(freeze=freeze, mesh=MeshSizes(**sizes), **given))

    check(r"layers\.[01]\.", pipeline=2)
    check(r"layers\.[01]\.", "lm_head")
    with pytest.raises(ParameterError) as caught:
        check(r"layers\.[01]\.", "lm_head", pipeline=2)
    assert caught.value.message.endswith("nothing to train on rank 0 of the pipeline (blocks 0, 1 with the embedding)")
    check(r"layers\.[01]\.", "lm_head", pipeline=2, schedule="interleaved")  # rank 0 also has block 2
    with pytest.raises(ParameterError, match=r"rank 1 of the pipeline \(blocks 1, 3 with the last norm and the head\)"):
        check(r"layers\.[13]\.", "lm_head", r"model\.norm", pipeline=2, schedule="interleaved")


@pytest.mark.parametrize(
    ("sizes", "parallel", "group", "expected"),
    [
        (MeshSizes(), "zero3", None, (1, 1, 8, 1, 1)),
        (MeshSizes(tensor=2), "zero3", None, (1, 1, 4, 1, 2)),
        (MeshSizes(tensor=2, pipeline=2), "ddp", None, (2, 2, 1, 1, 2)),
        (MeshSizes(context=2), "hsdp", 2, (1, 2, 2, 2, 1)),
        (MeshSizes(tensor=2, context=2, pipeline=2), "zero3", None, (2, 1, 1, 2, 2)),
    ],
)
def test_what_the_axes_leave_are_data_ranks(sizes, parallel, group, expected) -> None:
    mesh, batch = plan(mesh=sizes, parallel=parallel, shard_group=group)
    assert mesh.sizes == expected
    assert mesh.data_ranks * sizes.model_ranks == 8
    # The global batch never follows the mesh; 64 rows in micro-batches of 2.
    assert (batch.rows_per_step, batch.accumulation * mesh.data_ranks) == (64, 32)


def test_a_head_count_that_does_not_divide_is_shown_with_the_sizes_that_would() -> None:
    error = refusal(mesh=MeshSizes(tensor=8))
    assert "num_attention_heads 12 = 8 x 1 + 4, num_key_value_heads 4 = 8 x 0 + 4" in error.message
    assert "vocab_size" not in error.message
    assert "may be 1, 2, 4" in str(error.hint)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    error = refusal(
        world_size=6,
        sequence_length=30,
        global_batch_tokens=30 * 8,
        mesh=MeshSizes(tensor=8, context=4, pipeline=8),
        lora=Lora(),
    )
    for found in (
        "tensor 8 x context 4 x pipeline 8 = 256 ranks do not divide 6 workers",
        "adapters of `lora`",
        "tensor 8 does not divide num_attention_heads 12",
        "pipeline 8 with schedule 1f1b has 8 stages, and the model 6 blocks",
        "sequence_length 30 = 8 x 3 + 6",
    ):
        assert found in error.message


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"mesh": MeshSizes(tensor=2), "shape": None}, "is a module of your own"),
        ({"mesh": MeshSizes(schedule="gpipe")}, "schedule gpipe is of a pipeline, found pipeline 1"),
        ({"mesh": MeshSizes(pipeline=2), "global_batch_tokens": 32 * 8}, "needs at least 2 micro-batches in a step"),
        (
            {"mesh": MeshSizes(pipeline=2, schedule="interleaved"), "global_batch_tokens": 32 * 40},
            "takes micro-batches in 2 rounds of 2 or more of equal length, and 2 does not divide 5",
        ),
        ({"mesh": MeshSizes(tensor=2), "precision": "float8"}, "float8 multiplies whole matrices"),
        ({"mesh": MeshSizes(tensor=2), "compile": True}, "compile: true with mesh: tensor 2 gives other gradients"),
        ({"mesh": MeshSizes(tensor=2), "parallel": "hsdp", "shard_group": 3}, "3 does not divide 4 data ranks"),
        (
            {"mesh": MeshSizes(tensor=2), "global_batch_tokens": 32 * 60},
            "is no multiple of sequence_length 32 x 4 data ranks (8 workers / tensor 2) x micro_batch_sequences 2",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_process_starts(fields, found) -> None:
    assert found in refusal(**fields).message


def test_only_known_families_are_cut() -> None:
    opt = shape_of(model_config({"model_type": "opt"}))
    assert (
        "is known for llama, mistral, qwen2, qwen3, found model_type opt"
        in refusal(mesh=MeshSizes(tensor=2), shape=opt).message
    )
    windowed = shape_of(model_config({"model_type": "mistral", "sliding_window": 16}))
    assert "the model to the last 16 tokens of 32" in refusal(mesh=MeshSizes(context=2), shape=windowed).message
    assert shape_of(model_config({"model_type": "qwen2"})).sliding_window is None


axis_sizes = st.sampled_from([1, 2, 3, 4])


@given(pipeline=axis_sizes, data=axis_sizes, context=axis_sizes, tensor=axis_sizes, nodes=axis_sizes, draw=st.data())
def test_ranks_that_compute_together_stand_on_one_node(pipeline, data, context, tensor, nodes, draw) -> None:
    sizes = MeshSizes(tensor=tensor, context=context, pipeline=pipeline)
    mesh = plan_mesh("zero3", world_size=data * sizes.model_ranks, shard_group=None, sizes=sizes)
    ranks = data * sizes.model_ranks
    names = draw.draw(st.permutations([f"node-{rank * nodes // ranks}" for rank in range(ranks)]))
    counts = {names.count(name) for name in names}
    if tensor > 1 and (len(counts) > 1 or counts.pop() % tensor):
        with pytest.raises(ParameterError, match=f"mesh: tensor {tensor}"):
            place(names, mesh)
        return
    order = place(names, mesh)
    assert sorted(order) == list(range(ranks))
    groups = torch.tensor(order).view(-1, tensor).tolist()
    assert all(len({names[rank] for rank in group}) == 1 for group in groups)
    # Ranks of a node stay neighbours, and keep their own order.
    placed = [names[rank] for rank in order]
    assert [name for index, name in enumerate(placed) if name not in placed[:index]] == list(dict.fromkeys(names))
    assert sum(left != right for left, right in itertools.pairwise(placed)) == len(set(names)) - 1


def test_ranks_that_a_launcher_grouped_by_node_stay_where_they_are() -> None:
    mesh = MeshPlan(parallel="zero3", replicate=1, shard=4, tensor=2)
    assert place(["a"] * 4 + ["b"] * 4, mesh) == list(range(8))
    assert place(["a", "b"] * 4, mesh) == [0, 2, 4, 6, 1, 3, 5, 7]
    with pytest.raises(ParameterError, match="equally many workers, found a: 5, b: 3"):
        place(["a"] * 5 + ["b"] * 3, mesh)


@given(blocks=st.integers(1, 40), stages=st.integers(1, 12))
def test_stages_hold_every_block_once_and_about_as_many(blocks: int, stages: int) -> None:
    cuts = blocks_of_stages(blocks, stages)
    assert [block for cut in cuts for block in cut] == list(range(blocks))
    lengths = [len(cut) for cut in cuts]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@given(ranks=st.integers(2, 6), parts=st.integers(1, 5))
def test_ranks_that_share_a_row_have_every_token_once_and_equal_work(ranks: int, parts: int) -> None:
    tokens = 2 * ranks * parts
    device = torch.device("cpu")
    mine = [
        positions_of(tokens, DataShare(rank=0, num_ranks=1, context_rank=rank, num_context_ranks=ranks), device=device)
        for rank in range(ranks)
    ]
    assert sorted(torch.cat(mine).tolist()) == list(range(tokens))
    assert len({int((each + 1).sum()) for each in mine}) == 1  # pairs of query and key under a causal mask
    assert positions_of(tokens, DataShare(rank=0, num_ranks=1), device=device) is None
