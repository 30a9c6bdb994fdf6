"""ATen operations on each element alone.

Owns arithmetic, comparison and rounding. Knows nothing of programs; activations are in a file of their own. The one
decision: operands are promoted as torch promotes them, then one jax.numpy call does the work.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special

from pipeline.models.traced.dtypes import DEFAULT_FLOAT, cast, promote, promote_float, promoted_dtype
from pipeline.models.traced.overloads import overloads

Operation = Callable[..., Any]


def _unary(function: Callable[[Any], Any]) -> Operation:
    """Keeps the dtype."""
    return lambda x: function(jnp.asarray(x))


def _unary_float(function: Callable[[Any], Any]) -> Operation:
    """Integers become floats."""

    def apply(x: Any) -> jax.Array:
        (x,) = promote_float(x)
        return function(x)

    return apply


def _integral(function: Callable[[Any], Any]) -> Operation:
    """Rounding leaves integers as they are."""
    return lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _binary(function: Callable[[Any, Any], Any]) -> Operation:
    def apply(x: Any, y: Any) -> jax.Array:
        return function(*promote(x, y))

    return apply


def _binary_float(function: Callable[[Any, Any], Any]) -> Operation:
    def apply(x: Any, y: Any) -> jax.Array:
        return function(*promote_float(x, y))

    return apply


def _binary_bool(function: Callable[[Any, Any], Any]) -> Operation:
    def apply(x: Any, y: Any) -> jax.Array:
        return function(jnp.asarray(x) != 0, jnp.asarray(y) != 0)

    return apply


def _scaled(x: Any, alpha: Any) -> Any:
    return x if alpha == 1 else x * cast(alpha, x.dtype)


def add(x: Any, y: Any, alpha: Any = 1) -> jax.Array:
    """`x + alpha * y`."""
    x, y = promote(x, y)
    return x + _scaled(y, alpha)


def sub(x: Any, y: Any, alpha: Any = 1) -> jax.Array:
    """`x - alpha * y`."""
    x, y = promote(x, y)
    return x - _scaled(y, alpha)


def rsub(x: Any, y: Any, alpha: Any = 1) -> jax.Array:
    """`y - alpha * x`."""
    x, y = promote(x, y)
    return y - _scaled(x, alpha)


def div(x: Any, y: Any, rounding_mode: str | None = None) -> jax.Array:
    """True division, or rounded towards zero (`trunc`) or down (`floor`)."""
    if rounding_mode is None:
        x, y = promote_float(x, y)
        return x / y
    x, y = promote(x, y)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    # lax.div of integers rounds towards zero, as C does.
    return jax.lax.div(*jnp.broadcast_arrays(x, y)) if jnp.issubdtype(x.dtype, jnp.integer) else jnp.trunc(x / y)


def power(x: Any, exponent: Any) -> jax.Array:
    """`x ** exponent`; whole and half exponents take the exact path, whose gradient at zero is finite."""
    dtype = promoted_dtype((x, exponent))
    x = cast(x, dtype)
    if isinstance(exponent, int | float) and not isinstance(exponent, bool):
        if float(exponent).is_integer() and abs(exponent) <= 64:
            return jax.lax.integer_pow(x, int(exponent))
        if exponent == 0.5 and jnp.issubdtype(dtype, jnp.floating):
            return jnp.sqrt(x)
    return jnp.power(x, cast(exponent, dtype))


def float_power(x: Any, exponent: Any) -> jax.Array:
    """Power of floats."""
    return power(cast(x, DEFAULT_FLOAT), exponent)


def round_(x: jax.Array, decimals: int = 0) -> jax.Array:
    """To even at the half."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if decimals == 0:
        return jnp.round(x)
    scale = 10.0 ** abs(decimals)
    return jnp.round(x * scale) / scale if decimals > 0 else jnp.round(x / scale) * scale


def clamp(x: jax.Array, low: Any = None, high: Any = None) -> jax.Array:
    """Between `low` and `high`, either of which may be absent."""
    given = [limit for limit in (low, high) if limit is not None]
    dtype = promoted_dtype([x, *given])
    x = cast(x, dtype)
    if low is not None:
        x = jnp.maximum(x, cast(low, dtype))
    return x if high is None else jnp.minimum(x, cast(high, dtype))


def clamp_max(x: jax.Array, high: Any) -> jax.Array:
    """At most `high`."""
    return clamp(x, None, high)


def where(condition: jax.Array, x: Any = None, y: Any = None) -> jax.Array:
    """`x` where the condition holds, `y` elsewhere."""
    x, y = promote(x, y)
    return jnp.where(condition, x, y)


def masked_fill(x: jax.Array, mask: jax.Array, value: Any) -> jax.Array:
    """`value` where the mask holds."""
    return jnp.where(mask, cast(value, x.dtype), x)


def lerp(start: jax.Array, end: jax.Array, weight: Any) -> jax.Array:
    """`start + weight * (end - start)`."""
    start, end = promote(start, end)
    return start + cast(weight, start.dtype) * (end - start)


def addcmul(x: jax.Array, first: jax.Array, second: jax.Array, value: Any = 1) -> jax.Array:
    """`x + value * first * second`."""
    x, first, second = promote(x, first, second)
    return x + _scaled(first * second, value)


def addcdiv(x: jax.Array, first: jax.Array, second: jax.Array, value: Any = 1) -> jax.Array:
    """`x + value * first / second`."""
    x, first, second = promote_float(x, first, second)
    return x + _scaled(first / second, value)


def nan_to_num(x: jax.Array, nan: Any = None, posinf: Any = None, neginf: Any = None) -> jax.Array:
    """Finite numbers in place of the others."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


def logit(x: jax.Array, eps: float | None = None) -> jax.Array:
    """Inverse of the sigmoid; the input kept `eps` away from 0 and 1."""
    (x,) = promote_float(x)
    if eps is not None:
        x = jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))


def identity(x: Any, *_: Any, **__: Any) -> Any:
    """Copies, views of the same elements, and memory formats."""
    return x


def to_dtype(x: jax.Array, dtype: Any = None, *_: Any, **__: Any) -> jax.Array:
    """In another dtype."""
    return x if dtype is None else convert(x, dtype)


def type_as(x: jax.Array, other: jax.Array) -> jax.Array:
    """In the dtype of `other`."""
    return convert(x, other.dtype)


def convert(x: Any, dtype: Any) -> jax.Array:
    """Cast as torch does: complex to real drops the imaginary part, floats to integers are cut."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = x.real
    return x.astype(dtype)


def copy(x: jax.Array, source: jax.Array, _non_blocking: bool = False) -> jax.Array:
    """`source` in the shape and dtype of `x`."""
    return jnp.broadcast_to(convert(source, x.dtype), x.shape)


def detach(x: jax.Array) -> jax.Array:
    """No gradient passes."""
    return jax.lax.stop_gradient(x)


def complex_(real: jax.Array, imaginary: jax.Array) -> jax.Array:
    """Complex numbers from their parts."""
    return jax.lax.complex(*promote_float(real, imaginary))


def polar(magnitude: jax.Array, angle: jax.Array) -> jax.Array:
    """Complex numbers from length and angle."""
    return jax.lax.complex(magnitude * jnp.cos(angle), magnitude * jnp.sin(angle))


def view_as_real(x: jax.Array) -> jax.Array:
    """Complex [...] to real [..., 2]."""
    return jnp.stack([x.real, x.imag], axis=-1)


def view_as_complex(x: jax.Array) -> jax.Array:
    """Real [..., 2] to complex [...]."""
    return jax.lax.complex(x[..., 0], x[..., 1])


def frac(x: jax.Array) -> jax.Array:
    """The part behind the point, with the sign of x."""
    return x - jnp.trunc(x)


def heaviside(x: jax.Array, at_zero: jax.Array) -> jax.Array:
    """The step function."""
    return jnp.heaviside(*promote(x, at_zero)).astype(x.dtype)


_KEEPING: Mapping[str, Callable[[Any], Any]] = {
    "abs": jnp.abs, "neg": jnp.negative, "positive": jnp.positive, "sign": jnp.sign, "sgn": jnp.sign,
    "square": jnp.square, "conj": jnp.conj, "_conj": jnp.conj, "resolve_conj": jnp.asarray, "conj_physical": jnp.conj,
    "real": jnp.real, "imag": jnp.imag, "isnan": jnp.isnan, "isinf": jnp.isinf, "isfinite": jnp.isfinite,
    "isposinf": jnp.isposinf, "isneginf": jnp.isneginf, "logical_not": jnp.logical_not,
    "bitwise_not": jnp.bitwise_not, "signbit": jnp.signbit,
}  # fmt: skip
_ROUNDING: Mapping[str, Callable[[Any], Any]] = {
    "ceil": jnp.ceil, "floor": jnp.floor, "trunc": jnp.trunc, "fix": jnp.trunc, "frac": frac
}  # fmt: skip
_FLOATING: Mapping[str, Callable[[Any], Any]] = {
    "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "log": jnp.log, "log2": jnp.log2, "log10": jnp.log10,
    "log1p": jnp.log1p, "sqrt": jnp.sqrt, "rsqrt": jax.lax.rsqrt, "reciprocal": jnp.reciprocal, "sin": jnp.sin,
    "cos": jnp.cos, "tan": jnp.tan, "asin": jnp.arcsin, "acos": jnp.arccos, "atan": jnp.arctan, "sinh": jnp.sinh,
    "cosh": jnp.cosh, "tanh": jnp.tanh, "asinh": jnp.arcsinh, "acosh": jnp.arccosh, "atanh": jnp.arctanh,
    "erf": special.erf, "erfc": special.erfc, "erfinv": special.erfinv, "sigmoid": jax.nn.sigmoid,
    "lgamma": special.gammaln, "digamma": special.digamma, "sinc": jnp.sinc, "angle": jnp.angle,
    "special_ndtr": special.ndtr, "special_ndtri": special.ndtri, "special_log_ndtr": special.log_ndtr,
    "special_i0": special.i0, "i0": special.i0, "special_i0e": special.i0e, "special_i1": special.i1,
    "special_i1e": special.i1e, "special_entr": special.entr, "deg2rad": jnp.deg2rad, "rad2deg": jnp.rad2deg,
    "special_erfcx": lambda x: jnp.exp(x * x) * special.erfc(x), "special_expit": jax.nn.sigmoid,
    "special_expm1": jnp.expm1, "special_exp2": jnp.exp2, "special_log1p": jnp.log1p, "special_erf": special.erf,
    "special_erfc": special.erfc, "special_erfinv": special.erfinv, "special_gammaln": special.gammaln,
    "special_digamma": special.digamma, "special_sinc": jnp.sinc,
}  # fmt: skip
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "mul": jnp.multiply, "maximum": jnp.maximum, "minimum": jnp.minimum, "fmax": jnp.fmax, "fmin": jnp.fmin,
    "remainder": jnp.remainder, "fmod": jnp.fmod, "floor_divide": jnp.floor_divide, "multiply": jnp.multiply,
    "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater,
    "ge": jnp.greater_equal, "bitwise_and": jnp.bitwise_and, "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor, "__and__": jnp.bitwise_and, "__or__": jnp.bitwise_or,
    "__xor__": jnp.bitwise_xor, "__lshift__": jnp.left_shift, "__rshift__": jnp.right_shift,
    "bitwise_left_shift": jnp.left_shift, "bitwise_right_shift": jnp.right_shift, "gcd": jnp.gcd, "lcm": jnp.lcm,
    "not_equal": jnp.not_equal, "greater": jnp.greater, "greater_equal": jnp.greater_equal, "less": jnp.less,
    "less_equal": jnp.less_equal,
}  # fmt: skip
_BINARY_FLOAT: Mapping[str, Callable[[Any, Any], Any]] = {
    "atan2": jnp.arctan2, "arctan2": jnp.arctan2, "hypot": jnp.hypot, "logaddexp": jnp.logaddexp,
    "logaddexp2": jnp.logaddexp2, "true_divide": jnp.true_divide, "special_zeta": special.zeta,
    "nextafter": jnp.nextafter, "copysign": jnp.copysign, "xlogy": special.xlogy, "special_xlog1py": special.xlog1py,
    "special_xlogy": special.xlogy,
}  # fmt: skip
_LOGICAL: Mapping[str, Callable[[Any, Any], Any]] = {
    "logical_and": jnp.logical_and, "logical_or": jnp.logical_or, "logical_xor": jnp.logical_xor
}  # fmt: skip
_BOTH = ("default", "Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
"""Names under which torch has the overloads of a function of two operands."""

_IDENTITIES = (
    "clone.default", "contiguous.default", "alias.default", "lift_fresh_copy.default", "lift_fresh.default",
    "lift.default", "to.device", "to.prim_Device", "alias_copy.default", "requires_grad_.default",
    "detach_copy.default", "cpu.default", "resolve_neg.default",
)  # fmt: skip

POINTWISE: Mapping[str, Operation] = {
    **{f"aten.{name}.default": _unary(function) for name, function in _KEEPING.items()},
    **{f"aten.{name}.default": _integral(function) for name, function in _ROUNDING.items()},
    **{f"aten.{name}.default": _unary_float(function) for name, function in _FLOATING.items()},
    **{f"aten.{name}.{kind}": _binary(function) for name, function in _BINARY.items() for kind in _BOTH},
    **{f"aten.{name}.{kind}": _binary_float(function) for name, function in _BINARY_FLOAT.items() for kind in _BOTH},
    **{f"aten.{name}.default": _binary_bool(function) for name, function in _LOGICAL.items()},
    **{f"aten.{name}": identity for name in _IDENTITIES},
    **overloads("add", add, "Tensor", "Scalar"),
    **overloads("sub", sub, "Tensor", "Scalar"),
    **overloads("subtract", sub, "Tensor", "Scalar"),
    **overloads("rsub", rsub, "Tensor", "Scalar"),
    **overloads("div", div, "Tensor", "Scalar", "Tensor_mode", "Scalar_mode"),
    **overloads("divide", div, "Tensor", "Scalar", "Tensor_mode", "Scalar_mode"),
    **overloads("max", _binary(jnp.maximum), "other"),
    **overloads("min", _binary(jnp.minimum), "other"),
    **overloads("pow", power, "Tensor_Tensor", "Tensor_Scalar", "Scalar"),
    **overloads("float_power", float_power, "Tensor_Tensor", "Tensor_Scalar", "Scalar"),
    **overloads("round", round_, "default", "decimals"),
    **overloads("clamp", clamp, "default", "Tensor"),
    **overloads("clip", clamp, "default", "Tensor"),
    **overloads("clamp_min", clamp, "default", "Tensor"),
    **overloads("clamp_max", clamp_max, "default", "Tensor"),
    **overloads("where", where, "self", "Scalar", "ScalarSelf", "ScalarOther"),
    **overloads("masked_fill", masked_fill, "Scalar", "Tensor"),
    **overloads("lerp", lerp, "Scalar", "Tensor"),
    **overloads("nan_to_num", nan_to_num, "default"),
    **overloads("logit", logit, "default"),
    **overloads("special_logit", logit, "default"),
    **overloads("addcmul", addcmul, "default"),
    **overloads("addcdiv", addcdiv, "default"),
    **overloads("complex", complex_, "default"),
    **overloads("polar", polar, "default"),
    **overloads("view_as_real", view_as_real, "default"),
    **overloads("view_as_complex", view_as_complex, "default"),
    **overloads("heaviside", heaviside, "default"),
    **overloads("_to_copy", to_dtype, "default"),
    **overloads("to", to_dtype, "dtype", "dtype_layout"),
    **overloads("copy", copy, "default"),
    **overloads("type_as", type_as, "default"),
    **overloads("detach", detach, "default"),
    "prims.convert_element_type.default": convert,
}
