"""Interpolation, grid sampling, Fourier transforms and linear algebra are torch's."""

import pytest
import torch
from comparing import gradient_differences, value_differences

torch.manual_seed(4)
RESAMPLED_ERROR = 1e-5
"""Seen: 4e-6; coordinates are computed in single precision on both sides."""
ALGEBRA_ERROR = 2e-5
"""Seen: 8e-6 for an inverse."""
SQUARE = torch.randn(2, 4, 4)
INPUTS = {
    "s": torch.randn(2, 3, 9),
    "y": torch.randn(2, 3, 5, 7),
    "z": torch.randn(2, 3, 4, 5, 6),
    "g": torch.rand(2, 4, 6, 2) * 2.6 - 1.3,
    "h": torch.rand(2, 3, 4, 5, 3) * 2.6 - 1.3,
    "t": torch.randn(2, 2, 3),
}
MATRICES = {
    "x": torch.randn(2, 3, 5),
    "y": torch.randn(2, 3, 5),
    "w": torch.randn(4, 5),
    "b": torch.randn(4),
    "a": SQUARE,
    "p": SQUARE @ SQUARE.mT + 4 * torch.eye(4),
}
INTERPOLATED = [
    f"F.interpolate({arguments})"
    for arguments in (
        "s, size=13",
        "y, scale_factor=2",
        "y, size=(3, 11)",
        "y, scale_factor=(1.7, 0.6)",
        "y, size=(8, 3), mode='nearest-exact'",
        "z, scale_factor=2",
        "s, size=13, mode='linear'",
        "s, size=13, mode='linear', align_corners=True",
        "y, size=(9, 4), mode='bilinear'",
        "y, size=(9, 4), mode='bilinear', align_corners=True",
        "y, scale_factor=1.7, mode='bilinear'",
        "y, scale_factor=1.7, mode='bilinear', recompute_scale_factor=True",
        "y, size=(3, 4), mode='bilinear', antialias=True",
        "y, size=(9, 4), mode='bicubic'",
        "y, size=(9, 4), mode='bicubic', align_corners=True",
        "y, size=(3, 4), mode='bicubic', antialias=True",
        "y, size=(8, 11), mode='bicubic', antialias=True",
        "z, size=(6, 3, 8), mode='trilinear'",
        "y, size=(2, 3), mode='area'",
    )
] + ["F.affine_grid(t, (2, 3, 4, 5), align_corners=False)", "F.affine_grid(t, (2, 3, 4, 5), align_corners=True)"]
SAMPLED = [
    f"F.grid_sample(y, g, mode='{mode}', padding_mode='{padding}', align_corners={corners})"
    for mode in ("bilinear", "nearest", "bicubic")
    for padding in ("zeros", "border", "reflection")
    for corners in (False, True)
] + ["F.grid_sample(z, h, align_corners=False)"]
PRODUCTS = [
    "F.linear(x, w, b)",
    "F.linear(x[0, 0], w)",
    "x[0] @ w.t()",
    "w @ x[0, 0]",
    "b @ w",
    "x[0, 0].dot(y[0, 0])",
    "torch.bmm(x, y.mT)",
    "x[:, None] @ y.mT",
    "torch.addmm(b, x[0], w.t(), beta=0.5, alpha=2)",
    "torch.addmv(b, w, x[0, 0])",
    "torch.baddbmm(a[:, :3, :3], x, y.mT, beta=0.3)",
    "torch.addbmm(a[0, :3, :3], x, y.mT)",
    "torch.addr(w, b, x[0, 0])",
    "torch.outer(b, x[0, 0])",
    "torch.einsum('bij,kj->bik', x, w)",
    "torch.einsum('bij,bkj->bik', x, y)",
    "torch.inner(x, w)",
    "F.bilinear(x, y, torch.ones(2, 5, 5) * w[0], b[:2])",
    "torch.tensordot(x, w, dims=([2], [1]))",
    "torch.kron(x[0], w)",
    "torch.linalg.cross(x, y, dim=1)",
    "torch.cross(x[..., :3], y[..., :3])",
    "torch.vdot(torch.complex(x[0, 0], y[0, 0]), torch.complex(y[0, 0], x[0, 1])).imag",
    "torch.trace(x[0])",
    "torch.cdist(x, y)",
    "torch.cdist(x, y, p=1.0)",
]
SOLVED = [
    "torch.linalg.inv(p)",
    "torch.linalg.solve(p, w)",
    "torch.linalg.solve(p[0], b)",
    "torch.linalg.cholesky(p)",
    "torch.linalg.det(p)",
    "torch.linalg.slogdet(p)",
    "torch.linalg.eigvalsh(p)",
    "torch.linalg.qr(w)[1].abs()",
    "torch.linalg.svdvals(w)",
    "torch.linalg.matrix_power(p, 3) / 1e3",
    "torch.linalg.pinv(w)",
    "torch.matrix_exp(a * 0.1)",
    "torch.linalg.solve_triangular(p.tril(), w[None].expand(2, 4, 5), upper=False)",
    "torch.linalg.solve_triangular(p.tril(), w, upper=False)",
]
TRANSFORMS = [
    "torch.fft.rfft(x).abs()",
    "torch.view_as_real(torch.fft.fft(x, norm='ortho'))",
    "torch.fft.irfft(torch.complex(x, y), n=9)",
    "torch.fft.fft2(x).real",
    "torch.fft.ifft(torch.complex(x, y)).imag",
    "torch.fft.rfftn(x, dim=(0, 1)).real",
    "torch.fft.irfft2(torch.complex(x, y))",
    "torch.fft.fftshift(x)",
    "torch.fft.fftfreq(5) + x",
    "torch.stft(x.reshape(1, -1), 8, hop_length=4, window=torch.hann_window(8), return_complex=True).real",
]


@pytest.mark.parametrize("group", ["interpolated", pytest.param("sampled", marks=pytest.mark.slow)])
def test_images_are_resampled_as_torch_does(group: str) -> None:
    expressions = {"interpolated": INTERPOLATED, "sampled": SAMPLED}[group]
    assert value_differences(expressions, INPUTS, limit=RESAMPLED_ERROR) == []


@pytest.mark.slow
def test_gradients_of_resampling_are_torchs() -> None:
    assert gradient_differences([*INTERPOLATED[6:18:2], *SAMPLED[::3]], INPUTS) == []


@pytest.mark.parametrize(
    "group", ["products", *(pytest.param(name, marks=pytest.mark.slow) for name in ("transforms", "solved"))]
)
def test_linear_algebra_is_torchs(group: str) -> None:
    expressions = {"products": PRODUCTS, "solved": SOLVED, "transforms": TRANSFORMS}[group]
    assert value_differences(expressions, MATRICES, limit=ALGEBRA_ERROR) == []


@pytest.mark.slow
def test_gradients_of_products_are_torchs() -> None:
    assert gradient_differences(PRODUCTS, MATRICES) == []
