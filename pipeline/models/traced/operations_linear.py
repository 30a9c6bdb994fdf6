"""ATen products of matrices and linear algebra.

Owns products and decompositions of matrices. Knows nothing of programs. The one decision: weights keep torch's [out,
in] layout; `dot_general` contracts their last dim, so nothing is transposed in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.traced.dtypes import promote


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T + bias`, weight [out, in]."""
    x, weight = promote(x, weight)
    y = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return y if bias is None else y + bias.astype(y.dtype)


def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """Product of vectors, matrices, or batches of them."""
    return jnp.matmul(*promote(x, y))


def addmm(x: jax.Array, first: jax.Array, second: jax.Array, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """`beta * x + alpha * (first @ second)`."""
    product = matmul(first, second)
    product = product if alpha == 1 else product * jnp.asarray(alpha, product.dtype)
    if beta == 0:
        return product
    return product + (x if beta == 1 else x * jnp.asarray(beta, x.dtype))


def addbmm(x: jax.Array, first: jax.Array, second: jax.Array, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """As `addmm`, the products of the batch summed."""
    return beta * x + alpha * jnp.sum(jnp.matmul(first, second), axis=0)


def addr(x: jax.Array, first: jax.Array, second: jax.Array, *, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    """`beta * x + alpha * outer(first, second)`."""
    return beta * x + alpha * jnp.outer(first, second)


def outer(x: jax.Array, y: jax.Array) -> jax.Array:
    """Every product of two vectors' elements."""
    x, y = promote(x, y)
    return x[:, None] * y[None, :]


def einsum(equation: str, operands: Sequence[jax.Array], path: Any = None) -> jax.Array:
    """Einstein's sum convention."""
    return jnp.einsum(equation, *promote(*operands))


def bilinear(first: jax.Array, second: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`first @ weight[o] @ second + bias[o]`, weight [out, in1, in2]."""
    y = jnp.einsum("...i,oij,...j->...o", first, weight, second)
    return y if bias is None else y + bias


def tensordot(x: jax.Array, y: jax.Array, dims_x: Sequence[int], dims_y: Sequence[int]) -> jax.Array:
    """Sum over pairs of dims."""
    return jnp.tensordot(x, y, axes=(tuple(dims_x), tuple(dims_y)))


def linalg_cross(x: jax.Array, y: jax.Array, *, dim: int = -1) -> jax.Array:
    """Cross product of vectors of three."""
    first, second = jnp.broadcast_arrays(x, y)
    return jnp.cross(first, second, axis=dim)


def cross(x: jax.Array, y: jax.Array, dim: int | None = None) -> jax.Array:
    """As `linalg_cross`; without a dim along the first of size three."""
    return linalg_cross(x, y, dim=x.shape.index(3) if dim is None else dim)


def trace(x: jax.Array) -> jax.Array:
    """Sum of the diagonal."""
    return jnp.trace(x)


def solve_triangular(
    matrix: jax.Array, y: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    """The x of `matrix @ x = y` (or `x @ matrix = y`) for a triangle."""
    return jax.lax.linalg.triangular_solve(
        *_one_batch(matrix, y), left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


def _one_batch(matrix: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both with the same dims before those of the matrices."""
    lead = jnp.broadcast_shapes(matrix.shape[:-2], y.shape[:-2])
    return jnp.broadcast_to(matrix, (*lead, *matrix.shape[-2:])), jnp.broadcast_to(y, (*lead, *y.shape[-2:]))


def solve_ex(matrix: jax.Array, y: jax.Array, *, left: bool = True, **_: Any) -> tuple[jax.Array, jax.Array]:
    """The solution and torch's error codes (zeros)."""
    return solve(matrix, y, left=left), jnp.zeros(matrix.shape[:-2], jnp.int32)


def solve(matrix: jax.Array, y: jax.Array, *, left: bool = True) -> jax.Array:
    """The x of `matrix @ x = y` (or `x @ matrix = y`); y may be one vector a matrix."""
    if not left:
        return solve(matrix.mT, y.mT).mT  # x A = y is A' x' = y'
    if y.ndim == 1 or y.shape == matrix.shape[:-1]:
        return jnp.linalg.solve(matrix, y[..., None])[..., 0]
    return jnp.linalg.solve(*_one_batch(matrix, y))


def inv_ex(x: jax.Array, **_: Any) -> tuple[jax.Array, jax.Array]:
    """The inverse and torch's error codes (zeros)."""
    return jnp.linalg.inv(x), jnp.zeros(x.shape[:-2], jnp.int32)


def cholesky_ex(x: jax.Array, *, upper: bool = False, **_: Any) -> tuple[jax.Array, jax.Array]:
    """The root and torch's error codes (zeros)."""
    return jnp.linalg.cholesky(x, upper=upper), jnp.zeros(x.shape[:-2], jnp.int32)


def cholesky(x: jax.Array, upper: bool = False) -> jax.Array:
    """The triangular root of a positive matrix."""
    return jnp.linalg.cholesky(x, upper=upper)


def slogdet(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sign and logarithm of the determinant."""
    sign, logarithm = jnp.linalg.slogdet(x)
    return sign, logarithm


def determinant(x: jax.Array) -> tuple[jax.Array, None, None]:
    """The determinant; its factors are not made."""
    return jnp.linalg.det(x), None, None


def eigh(x: jax.Array, uplo: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues, ascending, and vectors."""
    values, vectors = jnp.linalg.eigh(x, UPLO=uplo)
    return values, vectors


def svd(x: jax.Array, full_matrices: bool = True, compute_uv: bool = True, **_: Any) -> tuple[jax.Array, ...]:
    """Singular vectors, values, and vectors."""
    if not compute_uv:  # through the thin factors, which have a gradient
        empty = jnp.zeros((0,), x.dtype)
        return empty, jnp.linalg.svd(x, full_matrices=False)[1], empty
    u, s, vh = jnp.linalg.svd(x, full_matrices=full_matrices)
    return u, s, vh


def qr(x: jax.Array, mode: str = "reduced") -> tuple[jax.Array, jax.Array]:
    """An orthogonal and a triangular factor."""
    q, r = jnp.linalg.qr(x, mode=mode)
    return q, r


def matrix_power(x: jax.Array, exponent: int) -> jax.Array:
    """The matrix multiplied by itself."""
    return jnp.linalg.matrix_power(x, exponent)


def pinv(x: jax.Array, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> jax.Array:
    """The pseudo-inverse; singular values up to `rtol` of the largest (or `atol`) count as zero."""
    if rtol is None:
        rtol = max(x.shape[-2:]) * float(jnp.finfo(x.dtype).eps)
    if atol is not None:
        rtol = jnp.maximum(rtol, atol / jnp.max(jnp.linalg.svdvals(x), axis=-1))
    return jnp.linalg.pinv(x, rtol=rtol, hermitian=hermitian)


def cdist(x: jax.Array, y: jax.Array, order: float = 2.0, _mode: Any = None) -> jax.Array:
    """Distance of every row of x to every row of y."""
    apart = jnp.abs(x[..., :, None, :] - y[..., None, :, :])
    if order == 2:
        total = jnp.sum(jnp.square(apart), axis=-1)
        return jnp.where(total == 0, 0, jnp.sqrt(jnp.where(total == 0, 1, total)))
    if order == float("inf"):
        return jnp.max(apart, axis=-1)
    if order == 0:
        return jnp.sum(apart != 0, axis=-1).astype(x.dtype)
    return jnp.sum(apart**order, axis=-1) ** (1 / order)


LINEAR: Mapping[str, Callable[..., Any]] = {
    "aten.linear.default": linear,
    "aten.matmul.default": matmul,
    "aten.mm.default": matmul,
    "aten.bmm.default": matmul,
    "aten.mv.default": matmul,
    "aten.dot.default": matmul,
    "aten.vdot.default": jnp.vdot,
    "aten.inner.default": jnp.inner,
    "aten.addmm.default": addmm,
    "aten.addmv.default": addmm,
    "aten.baddbmm.default": addmm,
    "aten.addbmm.default": addbmm,
    "aten.addr.default": addr,
    "aten.outer.default": outer,
    "aten.ger.default": outer,
    "aten.einsum.default": einsum,
    "aten.bilinear.default": bilinear,
    "aten.tensordot.default": tensordot,
    "aten.kron.default": jnp.kron,
    "aten.cross.default": cross,
    "aten.linalg_cross.default": linalg_cross,
    "aten.trace.default": trace,
    "aten.linalg_solve_triangular.default": solve_triangular,
    "aten.linalg_solve_ex.default": solve_ex,
    "aten.linalg_solve.default": solve,
    "aten.linalg_inv.default": jnp.linalg.inv,
    "aten.inverse.default": jnp.linalg.inv,
    "aten.linalg_inv_ex.default": inv_ex,
    "aten.linalg_cholesky_ex.default": cholesky_ex,
    "aten.linalg_cholesky.default": cholesky,
    "aten.cholesky.default": cholesky,
    "aten.linalg_det.default": jnp.linalg.det,
    "aten.det.default": jnp.linalg.det,
    "aten._linalg_det.default": determinant,
    "aten.linalg_slogdet.default": slogdet,
    "aten.slogdet.default": slogdet,
    "aten.linalg_eigh.default": eigh,
    "aten._linalg_eigh.default": eigh,
    "aten.linalg_svd.default": svd,
    "aten._linalg_svd.default": svd,
    "aten.linalg_qr.default": qr,
    "aten.linalg_matrix_power.default": matrix_power,
    "aten.linalg_pinv.atol_rtol_tensor": pinv,
    "aten.linalg_pinv.atol_rtol_float": pinv,
    "aten.linalg_matrix_exp.default": jax.scipy.linalg.expm,
    "aten.cdist.default": cdist,
    "aten._cdist_forward.default": cdist,
    "aten._euclidean_dist.default": cdist,
}
