"""Sums, extremes, norms, shares and losses are torch's."""

import pytest
import torch
from comparing import gradient_differences, value_differences

torch.manual_seed(2)
SUM_ERROR = 4e-6
"""Seen: 2e-6 for a standard deviation; sums are taken in another order."""
X = torch.randn(2, 3, 5)
INPUTS = {"x": X, "i": torch.randint(-3, 4, (2, 3, 5)), "b": X > 0.2}
LOSSES = {
    "a": torch.randn(6, 5),
    "c": torch.tensor([1, 0, 4, -100, 2, 2]),
    "p": torch.rand(6, 5) * 0.9 + 0.05,
    "q": torch.rand(6, 5),
}
WEIGHTED = {**LOSSES, "w": torch.rand(5)}
FLOATS = [
    "x.sum()",
    "x.sum(1)",
    "x.sum((0, 2), keepdim=True)",
    "x.mean()",
    "x.mean(-1, keepdim=True)",
    "x.var()",
    "x.var(1)",
    "x.var(1, unbiased=False)",
    "torch.var(x, (0, 2), correction=2, keepdim=True)",
    "x.std(2)",
    "torch.std_mean(x, 1)",
    "torch.var_mean(x, 1, unbiased=False)",
    "x.amax((0, 1))",
    "x.amin(2, keepdim=True)",
    "torch.aminmax(x, dim=1)",
    "x.max()",
    "x.min()",
    "x.max(1)",
    "x.min(-1, keepdim=True)",
    "torch.logsumexp(x, (0, 1))",
    "x.norm()",
    "x.norm(dim=1)",
    "x.norm(1, dim=2)",
    "torch.linalg.vector_norm(x, 3, dim=(1, 2))",
    "torch.linalg.vector_norm(x, inf, dim=1)",
    "torch.linalg.matrix_norm(x)",
    "x.prod()",
    "x.prod(1)",
    "x.softmax(1)",
    "F.log_softmax(x, -1)",
    "F.softmin(x, dim=0)",
    "x.cumsum(1)",
    "x.cumprod(2)",
    "torch.logcumsumexp(x, 2)",
    "torch.cummax(x, 1)",
    "F.normalize(x, dim=1)",
    "torch.nansum(torch.where(b, x, nan), 1)",
    "torch.trapezoid(x, dim=2)",
    "torch.quantile(x, 0.3, dim=2)",
]
COUNTS = [
    "i.sum(1)",
    "b.sum(-1)",
    "i.sum(1, dtype=torch.float32)",
    "x.argmax()",
    "x.argmax(1)",
    "x.argmin(2, keepdim=True)",
    "b.any()",
    "b.any(1)",
    "i.any(-1, keepdim=True)",
    "b.all()",
    "i.all(1)",
    "torch.count_nonzero(i, 1)",
    "i.cumsum(-1)",
    "b.cumsum(0)",
    "torch.cummin(i, 2)",
    "torch.linalg.vector_norm(x, 0, dim=1)",
    "i.prod(1)",
    "i.amax(1)",
    "i.max(2)",
    "torch.softmax(i.half(), -1, dtype=torch.float32)",
    "torch.softmax(x.masked_fill(x < 10, -inf), -1)",
    "torch.log_softmax(x.masked_fill(b, -inf), -1)",
]
LOSS = [
    "F.cross_entropy(a, c)",
    "F.cross_entropy(a, c, reduction='sum', label_smoothing=0.1)",
    "F.cross_entropy(a, c, reduction='none')",
    "F.cross_entropy(a, q.softmax(1), label_smoothing=0.2)",
    "F.cross_entropy(a.reshape(2, 5, 3), c.reshape(2, 3))",
    "F.nll_loss(F.log_softmax(a, 1), c)",
    "F.mse_loss(a, q)",
    "F.l1_loss(a, q, reduction='sum')",
    "F.smooth_l1_loss(a, q, beta=0.5)",
    "F.huber_loss(a, q, delta=0.7)",
    "F.binary_cross_entropy(p, q)",
    "F.binary_cross_entropy_with_logits(a, q)",
    "F.cosine_similarity(a, q)",
    "F.kl_div(F.log_softmax(a, 1), q, reduction='batchmean')",
    "F.pairwise_distance(a, q)",
    "F.triplet_margin_loss(a, q, p)",
    "F.poisson_nll_loss(a, q)",
]
BY_CLASS = [
    "F.cross_entropy(a, c, weight=w)",
    "F.cross_entropy(a, c, weight=w, label_smoothing=0.1)",
    "F.cross_entropy(a, q, weight=w)",
    "F.binary_cross_entropy_with_logits(a, q, pos_weight=w)",
]


@pytest.mark.parametrize("group", ["floats", "counts"])
def test_reductions_are_torchs(group: str) -> None:
    assert value_differences({"floats": FLOATS, "counts": COUNTS}[group], INPUTS, limit=SUM_ERROR) == []


@pytest.mark.slow
def test_gradients_of_reductions_are_torchs() -> None:
    assert gradient_differences(FLOATS, INPUTS) == []


def test_losses_are_torchs() -> None:
    assert value_differences(LOSS, LOSSES, limit=SUM_ERROR) == []


@pytest.mark.slow
def test_gradients_of_losses_are_torchs() -> None:
    assert gradient_differences(LOSS, LOSSES) == []


def test_weights_of_classes_count_in_the_mean() -> None:
    assert value_differences(BY_CLASS, WEIGHTED, limit=SUM_ERROR) == []
