"""Views, joins, padding, indexing and ordering give torch's elements in torch's places."""

import pytest
import torch
from comparing import gradient_differences, value_differences

torch.manual_seed(1)
LAYOUT = {"x": torch.randn(2, 3, 5), "y": torch.randn(2, 3, 5), "z": torch.randn(8, 3, 4)}
INDEXED = {
    "x": torch.randn(4, 5, 6),
    "s": torch.randn(4, 5, 6),
    "g": torch.randint(0, 4, (3, 5, 6)),
    "h": torch.randint(0, 5, (4, 3, 6)),
    "i": torch.tensor([2, 0, -1, 3]),
    "j": torch.tensor([0, -2, 1, 1]),
    "m": torch.randn(4, 5, 6) > 0.3,
    "r": torch.tensor([True, False, True, False]),
    "ids": torch.tensor([[1, 5, 3, 9, 0, 3, 2], [7, 7, 4, 8, 6, 2, 1]]),
    "e": torch.randn(10, 4),
}
VIEWS = [
    "x.view(6, -1)",
    "x.transpose(0, 1).reshape(3, 10)",
    "x.permute(2, 0, 1)",
    "x[0].t()",
    "x.mT",
    "x[:1].squeeze()",
    "x[:, :1].squeeze(1)",
    "x.squeeze(1)",
    "x.unsqueeze(-2)",
    "x[:, :1].expand(-1, 4, -1)",
    "x.expand(3, 2, 3, 5)",
    "x[:1].expand_as(y)",
    "x.repeat(2, 1, 3)",
    "x.repeat(2, 1, 1, 2)",
    "torch.tile(x, (2,))",
    "x.view_as(y)",
    "x.repeat_interleave(3, dim=1)",
    "x.flip(0, 2)",
    "x.roll(2, 1)",
    "x.roll((1, -2), (0, 2))",
    "x.roll(3)",
    "torch.rot90(x, 1, (1, 2))",
    "x.movedim(0, 2)",
    "x.flatten(1)",
    "x.flatten(1).unflatten(1, (5, -1))",
    "x.ravel()",
    "x.unfold(2, 3, 1)",
    "x.unfold(1, 2, 1)",
    "x.diagonal(1, 1, 2)",
    "torch.diag(x[0, 0])",
    "torch.diag(x[0], -1)",
    "torch.diag_embed(x, 1)",
    "torch.diag_embed(x, -1, 0, 2)",
    "x.tril(-1)",
    "x.triu(1)",
    "torch.diff(x, dim=1)",
    "torch.as_strided(x, (2, 2), (3, 1), 1)",
    "(x.view(torch.int32) > 0) * x",
    "torch.atleast_2d(x[0, 0])",
]
JOINS = [
    "torch.cat([x, y[:, :2]], 1)",
    "torch.cat([x, y > 0], -1)",
    "torch.cat([torch.empty(0), x], 0)",
    "torch.stack([x, y], -1)",
    "torch.hstack([x, y])",
    "torch.vstack([x, y])",
    "torch.dstack([x, y])",
    "x.split(2, -1)",
    "x.split([1, 4], 2)",
    "x.chunk(3, 2)",
    "torch.tensor_split(x, 3, 2)",
    "torch.tensor_split(x, (1, 3), 2)",
    "x.unbind(1)",
    "x.select(1, -1)",
    "x[:, 1:, ::2]",
    "x[..., -3:-1]",
    "x[:, :100]",
    "x[:, -100:2]",
    "x.narrow(2, 1, 3)",
    "torch.broadcast_tensors(x[:, :1], y)",
    "torch.meshgrid(x[0, 0], y[0, :, 0], indexing='ij')",
    "torch.meshgrid(x[0, 0], y[0, :, 0], indexing='xy')",
    "torch.slice_scatter(x, y[:, :2], 1, 0, 3, 2)",
    "torch.select_scatter(x, y[:, 0], 1, 2)",
    "torch.diagonal_scatter(x, y[:, 0, :3], 0, 1, 2)",
]
PADDING = [
    "F.pad(x, (1, 2, 0, 1))",
    "F.pad(x, (1, -2), value=3.0)",
    "F.pad(x, (2, 1), mode='reflect')",
    "F.pad(x, (2, 1), mode='replicate')",
    "F.pad(x, (2, 1), mode='circular')",
    "F.pad(x[None], (2, 1, 1, 1), mode='reflect')",
    "F.pad(x[None, None], (2, 1, 1, 1, 1, 0), mode='replicate')",
    "F.pad(x[None], (2, 1, 1, 1), mode='circular')",
    "F.pixel_shuffle(z, 2)",
    "F.pixel_unshuffle(x[:, :2, :4], 2)",
    "F.channel_shuffle(z[None], 4)",
]
READS = [
    "F.embedding(ids, e)",
    "F.embedding(ids, e, padding_idx=3)",
    "x[i]",
    "x[i, j]",
    "x[:, j]",
    "x[i, :, j]",
    "x[:, i[:, None], j]",
    "x[None, i]",
    "x.index_select(1, j.abs())",
    "torch.take(x, g)",
    "x.gather(0, g)",
    "x.gather(1, h[:, :, :4])",
    "torch.take_along_dim(x, h, 1)",
    "F.embedding_bag(ids, e, mode='sum')",
    "F.embedding_bag(ids.flatten(), e, torch.tensor([0, 4, 9]), mode='mean')",
    "F.embedding_bag(ids, e, mode='max')",
]
WRITES = [
    "x.scatter(0, g[:1], s[:1])",
    "x.scatter(0, g, 2.5)",
    "x.scatter_add(0, g, s[:3])",
    "x.scatter_reduce(0, g, s[:3], 'sum')",
    "x.scatter_reduce(0, g, s[:3], 'mean', include_self=False)",
    "x.scatter_reduce(0, g, s[:3], 'amax')",
    "x.scatter_reduce(0, g, s[:3], 'amin', include_self=False)",
    "x.index_add(1, j.abs(), s[:, :4], alpha=2)",
    "x.index_copy(1, torch.tensor([3, 0]), s[:, :2])",
    "x.index_fill(0, torch.tensor([1, 3]), 9.0)",
    "changed(x, (i, j.flip(0)), s[:, 0])",
    "changed(x, (slice(None), torch.tensor([3, 0, 2, 4])), s[:, :4])",
    "x.index_put((i, j), s[:, 0], accumulate=True)",
    "changed(x, m, 7.0)",
    "changed(x, m, torch.tensor(2.0))",
    "changed(x, r, s[0])",
    "x.masked_scatter(m, s)",
]
ORDERS = [
    "x.sort(1)",
    "x.sort(-1, descending=True)",
    "torch.sort(x, stable=True, dim=0)",
    "x.topk(3)",
    "x.topk(2, dim=1, largest=False)",
    "x.topk(2, dim=0)",
    "x.kthvalue(2)",
    "torch.msort(x)",
    "x.median(1)",
    "x.median()",
]
WHOLE = [
    "x.argsort(2)",
    "F.one_hot(ids, 10)",
    "torch.isin(ids, torch.tensor([1, 3]))",
    "torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]))",
    "torch.bucketize(ids, torch.tensor([1, 3, 5]), right=True)",
    "torch.searchsorted(e.sort(0)[0].t().contiguous(), e.t().contiguous())",
    "torch.arange(5)",
    "torch.arange(1, x.shape[-1] * 2, 3)",
    "torch.arange(0.0, 1.0, 0.1)",
    "torch.arange(5, 0, -2)",
    "torch.arange(3, dtype=torch.float32)",
    "torch.full((2, 2), 3.5)",
    "torch.full((2, 2), True)",
    "torch.zeros_like(ids)",
    "torch.full_like(x, 2, dtype=torch.int32)",
    "x.new_ones((2,), dtype=torch.bool)",
    "x.new_full((2,), 7)",
    "torch.eye(2, 4)",
    "torch.linspace(-1, 2, 7)",
    "torch.logspace(0, 1, 4)",
    "torch.tril_indices(3, 4)",
    "torch.triu_indices(4, 3, 1)",
    "torch.tensor([1, 2, 3]) + ids[0, 0]",
    "torch.hann_window(8)",
    "torch.hamming_window(8, periodic=False)",
    "torch.full((2,), torch.iinfo(torch.int64).max) > 5",
    "torch.full((2,), torch.finfo(torch.float32).min)",
]
LAYOUT_GROUPS = {"views": VIEWS, "joins": JOINS, "padding": PADDING}
INDEXED_GROUPS = {"reads": READS, "writes": WRITES, "orders": ORDERS}


@pytest.mark.parametrize("group", LAYOUT_GROUPS)
def test_elements_move_to_torchs_places(group: str) -> None:
    assert value_differences(LAYOUT_GROUPS[group], LAYOUT) == []


@pytest.mark.parametrize("group", [*INDEXED_GROUPS, "whole numbers"])
def test_reading_writing_and_ordering_is_torchs(group: str) -> None:
    assert value_differences({**INDEXED_GROUPS, "whole numbers": WHOLE}[group], INDEXED) == []


@pytest.mark.slow
@pytest.mark.parametrize("group", LAYOUT_GROUPS)
def test_gradients_move_back(group: str) -> None:
    assert gradient_differences(LAYOUT_GROUPS[group], LAYOUT) == []


@pytest.mark.parametrize(
    "group", ["writes", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reads", "orders"))]
)
def test_gradients_follow_indices(group: str) -> None:
    assert gradient_differences(INDEXED_GROUPS[group], INDEXED) == []
