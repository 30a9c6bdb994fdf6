"""Convolutions, pools, norms and attention are torch's in every mode they have."""

import pytest
import torch
from comparing import gradient_differences, value_differences

torch.manual_seed(3)
PRODUCT_ERROR = 4e-6
"""Seen: 2e-6 for a convolution of 108 products; sums are taken in another order."""
IMAGES = {"x": torch.randn(2, 6, 11), "y": torch.randn(2, 6, 9, 7), "z": torch.randn(2, 4, 5, 6, 7)}
FILTERS = {
    **IMAGES,
    "a": torch.randn(8, 6, 3),
    "b": torch.randn(8, 6, 3, 2),
    "c": torch.randn(3, 4, 2, 3, 2),
    "d": torch.randn(8),
}
TRANSPOSED = {
    **IMAGES,
    "a": torch.randn(6, 4, 3),
    "b": torch.randn(6, 4, 3, 2),
    "g": torch.randn(6, 2, 3, 2),
    "c": torch.randn(4, 3, 2, 3, 2),
    "d": torch.randn(4),
}
NORMED = {
    "y": torch.randn(2, 6, 9, 7),
    "c": torch.rand(6) + 0.5,
    "d": torch.randn(6),
    "w": torch.randn(7),
    "v": torch.randn(9, 7),
}
RUNNING = {**NORMED, "m": torch.randn(6), "s": torch.rand(6) + 0.3}
SEEN = torch.rand(2, 1, 5, 7) > 0.4
SEEN[0, 0, 2] = False  # one query that sees nothing
ATTENTION = {
    "q": torch.randn(2, 4, 5, 6),
    "k": torch.randn(2, 4, 7, 6),
    "v": torch.randn(2, 4, 7, 3),
    "kg": torch.randn(2, 2, 7, 6),
    "vg": torch.randn(2, 2, 7, 3),
    "m": SEEN,
    "f": torch.randn(5, 7),
}
CASES = {
    "convolutions": (
        FILTERS,
        [
            "F.conv1d(x, a, d, padding=1)",
            "F.conv1d(x, a, None, stride=2, dilation=2)",
            "F.conv1d(x, a, padding='same', dilation=2)",
            "F.conv2d(y, b, padding='same')",
            "F.conv2d(y, b, d, stride=(2, 1), padding=(1, 0), dilation=(1, 2))",
            "F.conv2d(y, b[:, :3], d, groups=2)",
            "F.conv2d(y, b[:6, :1], groups=6)",
            "F.conv3d(z, c, padding=(1, 0, 1))",
            "F.conv2d(y[0], b, d)",
        ],
    ),
    "transposed convolutions": (
        TRANSPOSED,
        [
            "F.conv_transpose1d(x, a, stride=2, padding=1, output_padding=1)",
            "F.conv_transpose1d(x, a, d, dilation=2)",
            "F.conv_transpose2d(y, b, stride=(2, 3), padding=(1, 0), output_padding=(0, 2))",
            "F.conv_transpose2d(y, g, d, groups=2, stride=2)",
            "F.conv_transpose3d(z, c, stride=2, padding=1)",
            "F.conv_transpose1d(x[0], a)",
        ],
    ),
    "maxima": (
        IMAGES,
        [
            "F.max_pool1d(x, 3)",
            "F.max_pool2d(y, 3, stride=2, padding=1)",
            "F.max_pool2d(y, (2, 3), stride=(3, 2), ceil_mode=True)",
            "F.max_pool2d(y, 2, stride=1, dilation=2)",
            "F.max_pool3d(z, 2, ceil_mode=True)",
            "F.adaptive_max_pool1d(x, 4)",
            "F.max_pool2d(y, 3, stride=2, padding=1, return_indices=True)",
            "F.adaptive_max_pool2d(y, (4, 3), return_indices=True)",
            "F.adaptive_max_pool3d(z, (2, 3, 4))",
        ],
    ),
    "means": (
        IMAGES,
        [
            "F.avg_pool1d(x, 3, 2, 1)",
            "F.avg_pool2d(y, 3, 2, 1)",
            "F.avg_pool2d(y, 3, 2, 1, count_include_pad=False)",
            "F.avg_pool2d(y, 3, 2, 1, ceil_mode=True)",
            "F.avg_pool2d(y, 2, 2, ceil_mode=True)",
            "F.avg_pool2d(y, 2560, ceil_mode=True)",
            "F.avg_pool2d(y, (4, 64), padding=(1, 2), ceil_mode=True)",
            "F.max_pool2d(y, (4, 64), padding=(1, 2), ceil_mode=True)",
            "F.avg_pool2d(y, (2, 3), (3, 2), (1, 1), ceil_mode=True, count_include_pad=False)",
            "F.avg_pool2d(y, 3, 2, 1, divisor_override=5)",
            "F.avg_pool3d(z, 2, 2, 1)",
            "F.adaptive_avg_pool1d(x, 4)",
            "F.adaptive_avg_pool2d(y, (4, 3))",
            "F.adaptive_avg_pool2d(y, 1)",
            "F.adaptive_avg_pool2d(y, (3, None))",
            "F.adaptive_avg_pool2d(y, (12, 10))",
            "F.adaptive_avg_pool3d(z, (2, 3, 4))",
            "F.lp_pool2d(y.abs(), 2, 3, 2)",
            "F.local_response_norm(y, 3)",
            "F.unfold(y, (3, 2), dilation=(2, 1), padding=(1, 0), stride=(1, 2))",
            "F.fold(x[:, :4, :9], (4, 4), (2, 2))",
        ],
    ),
    "norms": (
        NORMED,
        [
            "F.layer_norm(y, (7,), w, w * 2, 1e-3)",
            "F.layer_norm(y, (9, 7), v)",
            "F.group_norm(y, 3, c, d, 1e-3)",
            "F.group_norm(y, 2)",
            "F.batch_norm(y, None, None, c, d, True)",
            "F.instance_norm(y, None, None, c, d)",
            "F.rms_norm(y, (7,), w, 1e-4)",
            "F.rms_norm(y, (9, 7))",
            "torch._weight_norm(y, c[None, :, None, None], 1)",
        ],
    ),
    "attention": (
        ATTENTION,
        [
            f"F.scaled_dot_product_attention({arguments})"
            for arguments in (
                "q, k, v",
                "q, k, v, is_causal=True",
                "q, k, v, attn_mask=m",
                "q, k, v, attn_mask=f",
                "q, k, v, scale=0.3",
                "q, kg, vg, enable_gqa=True",
                "q[0], k[0], v[0]",
                "q, kg, vg, enable_gqa=True, is_causal=True",
            )
        ],
    ),
}


@pytest.mark.parametrize("group", [pytest.param(name, marks=[pytest.mark.slow] * (name == "maxima")) for name in CASES])
def test_layers_are_torchs(group: str) -> None:
    inputs, expressions = CASES[group]
    assert value_differences(expressions, inputs, limit=PRODUCT_ERROR) == []


def test_running_statistics_are_used_where_torch_uses_them() -> None:
    expressions = [
        "F.batch_norm(y, m, s, c, d, False, 0.1, 1e-3)",
        "F.batch_norm(y, m, s)",
        "F.instance_norm(y, m, s, c, d, use_input_stats=False)",
    ]
    assert value_differences(expressions, RUNNING, limit=PRODUCT_ERROR) == []


def test_the_sums_beside_attention_count_what_is_seen() -> None:
    kernel = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"
    expressions = [f"{kernel}(q, k, k, 0.0, True)", f"{kernel}(q, k, k, attn_mask=f)"]
    assert value_differences(expressions, ATTENTION, limit=PRODUCT_ERROR) == []


@pytest.mark.parametrize(
    "group",
    [
        "attention",
        *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "attention"),
    ],
)
def test_gradients_of_layers_are_torchs(group: str) -> None:
    inputs, expressions = CASES[group]
    assert gradient_differences(expressions, inputs) == []
