"""Operations on each element compute what torch computes, with torch's dtypes and signs."""

import pytest
import torch
from comparing import gradient_differences, value_differences

torch.manual_seed(0)
X, Y, P = torch.randn(2, 3, 5), torch.randn(2, 3, 5), torch.rand(2, 3, 5) * 0.9 + 0.05
WHOLE, SIGNED = torch.randint(-7, 8, (2, 3, 5)), torch.tensor([-3, 2, 5, -2, 3]).expand(2, 3, 5).contiguous()
B = Y > 0
INPUTS = {"x": X, "y": Y, "p": P, "i": WHOLE, "j": SIGNED, "b": B}

ANY = [
    "abs",
    "neg",
    "sign",
    "ceil",
    "floor",
    "trunc",
    "frac",
    "exp",
    "exp2",
    "expm1",
    "sin",
    "cos",
    "tan",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "erf",
    "erfc",
    "sigmoid",
    "square",
    "sinc",
    "deg2rad",
    "round",
]
POSITIVE = [
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "asin",
    "acos",
    "atanh",
    "erfinv",
    "lgamma",
    "digamma",
    "logit",
]
SPECIAL = ["ndtr", "log_ndtr", "i0", "i0e", "i1", "i1e", "erfcx"]
TWO = [
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "remainder",
    "fmod",
    "atan2",
    "hypot",
    "copysign",
    "logaddexp",
    "logaddexp2",
]
ACTIVATIONS = [
    "relu",
    "relu6",
    "silu",
    "gelu",
    "softplus",
    "softsign",
    "elu",
    "celu",
    "selu",
    "leaky_relu",
    "hardtanh",
    "hardsigmoid",
    "hardswish",
    "hardshrink",
    "softshrink",
    "mish",
    "logsigmoid",
    "tanhshrink",
]

SMOOTH = {
    "one operand": [f"torch.{name}(x * 2)" for name in ANY] + [f"torch.{name}(p)" for name in POSITIVE],
    "special": [f"torch.special.{name}(x)" for name in SPECIAL] + ["torch.special.ndtri(p)", "torch.special.entr(p)"],
    "two operands": [f"torch.{name}(x, y)" for name in TWO],
    "activations": [
        *(f"F.{name}(x)" for name in ACTIVATIONS),
        "F.gelu(x, approximate='tanh')",
        "F.softplus(x * 10, beta=3, threshold=5)",
        "F.elu(x, 1.7)",
        "F.celu(x, 1.3)",
        "F.hardtanh(x, -0.4, 0.8)",
        "F.threshold(x, 0.1, -3.0)",
        "F.glu(torch.cat([x, y], 1), 1)",
        "F.prelu(x, p[0, :, 0])",
        "F.prelu(x, p[0, 0, :1])",
        "F.rrelu(x)",
    ],
    "with numbers": [
        "2 - x",
        "x / 3",
        "3 / (x + 4)",
        "x % 0.7",
        "torch.fmod(x, -0.7)",
        "x**2",
        "x**3",
        "p**0.5",
        "x**-1",
        "p**1.7",
        "2**x",
        "torch.add(x, i, alpha=3)",
        "torch.sub(x, i, alpha=0.5)",
        "torch.xlogy(x, p)",
        "torch.lerp(x, y, 0.3)",
        "torch.lerp(x, y, p)",
        "torch.addcmul(x, y, p, value=0.3)",
        "torch.addcdiv(x, y, p + 1, value=0.3)",
    ],
    "choices": [
        "torch.where(b, x, y)",
        "torch.where(b, x, 0.0)",
        "torch.where(b, 1.0, y)",
        "x.masked_fill(b, 2.0)",
        "x.masked_fill(b, torch.tensor(2.0))",
        "x.clamp(-0.5, 0.7)",
        "x.clamp(min=0.1)",
        "x.clamp_max(0.1)",
        "torch.clamp(x, min=y)",
        "torch.nan_to_num(torch.where(b, x, nan))",
        "torch.nan_to_num(torch.where(b, x, inf), posinf=3.0)",
        "x.detach() * y",
        "(x.double() * y).float()",
        "x.clone().add_(1).mul_(y)",
        "torch.zeros_like(x).copy_(y * 2)",
        "torch.empty_like(x).fill_(3.0) + x",
        "changed(x, (slice(None), 1), y[:, 2])",
        "changed(x, (0, slice(None, None, 2)), 3.0)",
    ],
}
STEPS = {
    "integers": [
        *(
            f"torch.{name}(i)"
            for name in [
                "abs",
                "neg",
                "sign",
                "ceil",
                "floor",
                "round",
                "exp",
                "sin",
                "sigmoid",
                "sqrt",
                "square",
                "bitwise_not",
            ]
        ),
        "torch.logical_not(i)",
        "~b",
        "torch.exp(b)",
        "torch.rsqrt(i)",
        "i / j",
        "i // j",
        "i % j",
        "torch.fmod(i, j)",
        "torch.div(i, j, rounding_mode='trunc')",
        "torch.div(i, 3, rounding_mode='floor')",
        "i // 3",
        "i // -3",
        "i % 3",
        "i % -3",
        "i**2",
        "(i.abs() + 1) ** 0.5",
        "2 ** i.abs()",
        "i**j.abs()",
        "torch.gcd(i, j)",
        "torch.max(i, j)",
        "i & 3",
        "i | 4",
        "i ^ 5",
        "i << 2",
        "i >> 1",
        "torch.where(i > j, i, 0)",
        "torch.where(i > j, i, 0.5)",
    ],
    "comparisons": [
        *(
            f"torch.{name}(x, y)"
            for name in ["eq", "ne", "lt", "le", "gt", "ge", "floor_divide", "logical_and", "logical_or", "logical_xor"]
        ),
        "i == 2",
        "i < 2.5",
        "torch.isnan(x / 0)",
        "torch.isfinite(x / i)",
        "torch.isinf(x / i)",
        "b & (x > 1)",
        "b ^ (x > 1)",
        "b + b",
        "torch.signbit(x)",
        "torch.heaviside(x, y)",
        "x // 0.7",
    ],
    "rounding": [
        "torch.round(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]) + 0 * x)",
        "torch.round(x, decimals=2)",
        "torch.div(x, 0.7, rounding_mode='trunc')",
        "torch.div(x, 0.7, rounding_mode='floor')",
        "(i.float() * 0.6).to(torch.int64)",
        "(p * 300).to(torch.int16).to(torch.uint8)",
        "i.bool()",
    ],
    "promotion": [
        "i + 2.5",
        "i * 2.0",
        "b * 3",
        "b * 3.0",
        "i.to(torch.uint8) + j.to(torch.int8)",
        "i.to(torch.int8) * 100",
        "i.to(torch.uint8) + 300",
        "torch.where(b, i, torch.iinfo(torch.int64).max) > 100",
        "x.half() + torch.tensor(0.3)",
        "x.half() + i",
        "x.half() + y",
        "b + torch.tensor(3)",
        "i + torch.tensor(0.5)",
        "i.to(torch.int16) + torch.tensor(7)",
        "b.type_as(x)",
        "x.half()",
        "x + 1j",
        "torch.complex(x, y) * 2",
        "torch.view_as_real(torch.polar(p, x))",
        "torch.complex(x, y).abs()",
        "torch.full((2,), 3)",
        "-x.to(torch.int32)",
    ],
}


@pytest.mark.parametrize(
    "group", [pytest.param(name, marks=[pytest.mark.slow] * (name == "special")) for name in (*SMOOTH, *STEPS)]
)
def test_values_and_dtypes_are_torchs(group: str) -> None:
    assert value_differences({**SMOOTH, **STEPS}[group], INPUTS) == []


@pytest.mark.parametrize(
    "group", ["choices", *(pytest.param(name, marks=pytest.mark.slow) for name in SMOOTH if name != "choices")]
)
def test_gradients_are_torchs(group: str) -> None:
    assert gradient_differences(SMOOTH[group], INPUTS) == []
