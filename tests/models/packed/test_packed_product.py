"""Products of packed weights against float64, on every handler that this machine can run."""

import os
import stat
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler import compiler_is_missing
from flax import nnx

from pipeline.models.decoders.layers import Projection
from pipeline.models.packed.building import build
from pipeline.models.packed.calls import support
from pipeline.models.packed.modules import PackedProjection, choose_products, pack_projections
from pipeline.models.packed.product import COLUMNS, counting_rows, pack, packed_product, real_rows

# A sum of 576 products in float32 is off by 3e-7 of the largest; measured over the shapes below.
TOLERANCE = 2e-6
ROWS = (1, 2, 3, 5, 6, 7, 8, 13, 97, 200)
SHAPES = ((1, 1), (7, 5), (33, 48), (64, 101), (576, 96))
HEADERS = Path(jax.ffi.include_dir())


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_that_of_the_weight_before_it_was_packed(target: str, shape: tuple[int, int]) -> None:
    kernel = drawn(*shape)
    packed = pack(jnp.asarray(kernel))
    assert packed.shape == (-(-shape[1] // COLUMNS), shape[0], COLUMNS)
    multiply = jax.jit(lambda x: packed_product(x, packed, num_out=shape[1]))
    for rows in ROWS:
        x = drawn(rows, shape[0], seed=rows)
        right = x.astype(np.float64) @ kernel
        wrong_by = np.abs(np.asarray(multiply(x)) - right).max() / np.abs(right).max()
        assert wrong_by < TOLERANCE, rows


def test_a_row_gets_the_same_bits_alone_and_among_others(target: str) -> None:
    packed = pack(jnp.asarray(drawn(576, 101)))
    multiply = jax.jit(lambda x: packed_product(x, packed, num_out=101))
    x = drawn(200, 576)
    together = np.asarray(multiply(x))
    for row in (0, 7, 8, 95, 96, 199):
        np.testing.assert_array_equal(np.asarray(multiply(x[row : row + 1]))[0], together[row])
    np.testing.assert_array_equal(np.asarray(multiply(x[:8])), together[:8])


@pytest.mark.parametrize("count", [0, 1, 9, 96, 97, 130, 131, 4000])
def test_only_rows_that_count_are_computed(target: str, count: int) -> None:
    packed = pack(jnp.asarray(drawn(64, 101)))

    @jax.jit
    def multiply(x: jax.Array, count: jax.Array) -> jax.Array:
        with counting_rows(count):
            return packed_product(x, packed, num_out=101)

    x = drawn(131, 64)
    whole, part = np.asarray(multiply(x, jnp.int32(131))), np.asarray(multiply(x, jnp.int32(count)))
    np.testing.assert_array_equal(part[:count], whole[:count])
    assert not part[count:].any()
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: packed_product(x, packed, num_out=101))(x)), whole)


def test_many_products_at_once_wait_for_no_thread_that_waits_for_them(target: str) -> None:
    kernels = [jnp.asarray(drawn(64, 960, seed=number)) for number in range(8)]
    packed = [pack(kernel) for kernel in kernels]

    @jax.jit
    def side_by_side(x: jax.Array) -> list[jax.Array]:
        return [packed_product(x, one, num_out=960) for one in packed]

    x = drawn(16, 64)
    right = [np.asarray(x @ kernel) for kernel in kernels]
    wrong: list[float] = []

    def ask() -> None:
        for _ in range(30):
            for found, wanted in zip(side_by_side(x), right, strict=True):
                wrong.append(float(np.abs(np.asarray(found) - wanted).max()))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(wrong) == 4 * 30 * 8
    assert max(wrong) < 1e-4


def test_projections_of_both_kinds_are_packed_and_compute_the_same() -> None:
    class Two(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(24, 50, rngs=rngs)
            self.second = Projection.initialized(50, 49, use_bias=True, scale=0.1, rngs=rngs, dtype=jnp.float32)
            self.narrow = nnx.Linear(49, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.narrow(self.second(jax.nn.silu(self.first(x))))

    model = Two(nnx.Rngs(0))
    model.first.bias[...] = drawn(50)
    model.second.bias[...] = drawn(49)
    x = drawn(2, 5, 24)
    right = np.asarray(model(x))
    packed = pack_projections(model)
    assert isinstance(packed.first, PackedProjection)
    assert isinstance(packed.second, PackedProjection)
    assert isinstance(packed.narrow, nnx.Linear), "filling up three columns would read sixteen times the weight"
    np.testing.assert_allclose(np.asarray(jax.jit(packed)(x)), right, rtol=0, atol=1e-5)


def test_what_is_not_float32_on_one_cpu_keeps_xlas_products_and_says_why() -> None:
    if support().product is None:
        compiler_is_missing(support().reason)
    assert choose_products(platform="cpu", dtype="float32").is_packed
    assert "weights laid out for AVX" in choose_products(platform="cpu", dtype="float32").reason
    for given, word in (
        ({"platform": "gpu", "dtype": "float32"}, "accelerator"),
        ({"platform": "cpu", "dtype": "bfloat16"}, "bfloat16"),
        ({"platform": "cpu", "dtype": "float32", "num_devices": 2}, "2 devices"),
    ):
        choice = choose_products(**given)
        assert not choice.is_packed
        assert word in choice.reason


@pytest.mark.parametrize(
    ("num_in", "order", "word"),
    [
        (5, [0, 1], "do not give y"),
        (4, [0], "do not give y"),
        (4, [0, 2], "does not have"),
        (4, [-1, 0], "does not have"),
    ],
)
def test_a_call_with_what_does_not_fit_is_refused(num_in: int, order: list[int], word: str) -> None:
    name = support().product
    if name is None:
        compiler_is_missing(support().reason)
    wrong = jax.jit(
        lambda x: jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((2, 48), jnp.float32))(
            x, jnp.zeros((1, num_in, COLUMNS)), jnp.asarray(order, jnp.int32), jnp.int32(2)
        )
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=word):
        jax.block_until_ready(wrong(drawn(2, 4)))


@pytest.mark.parametrize("lengths", [(13, 1, 7), (16, 16, 16), (1, 1, 1), (0, 5, 16)], ids=str)
def test_rows_that_are_padding_are_not_computed_wherever_they_are(target: str, lengths: tuple[int, ...]) -> None:
    packed = pack(jnp.asarray(drawn(64, 101)))
    mask = (np.arange(16) < np.asarray(lengths)[:, None]).astype(np.int32)

    def multiply(x: jax.Array) -> jax.Array:
        return packed_product(x, packed, num_out=101)

    @jax.jit
    def of_real(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        count, order = real_rows(mask)
        with counting_rows(count, order_B=order):
            return multiply(x), multiply(x[:, 0])

    x = drawn(3, 16, 64)
    whole, first = np.asarray(jax.jit(multiply)(x)), np.asarray(jax.jit(multiply)(x[:, 0]))
    part, others = of_real(x, mask)
    np.testing.assert_array_equal(np.asarray(part), np.where(mask[..., None] != 0, whole, 0.0))
    np.testing.assert_array_equal(np.asarray(others), first, err_msg="a product of other rows computes all of them")


def test_products_of_each_number_of_rows_have_a_count_of_their_own(target: str) -> None:
    packed = pack(jnp.asarray(drawn(64, 101)))
    many, few = np.arange(24, dtype=np.int32), np.arange(4, dtype=np.int32)

    @jax.jit
    def counted(x: jax.Array) -> list[jax.Array]:
        with counting_rows(19, order_B=many), counting_rows(2, order_B=few):
            return [packed_product(x[:rows], packed, num_out=101) for rows in (24, 4, 7)]

    found = counted(drawn(24, 64))
    assert [int(np.asarray(made).any(axis=1).sum()) for made in found] == [19, 2, 7]
    assert np.asarray(found[0])[:19].any(axis=1).all() and np.asarray(found[1])[:2].any(axis=1).all()


def test_without_a_compiler_the_reason_names_what_was_looked_for(tmp_path: Path) -> None:
    library = build(tmp_path, headers=HEADERS, environment={"PATH": str(tmp_path)})
    assert library.path is None
    assert "no C++ compiler (c++, g++, clang++)" in library.reason


def test_a_compiler_in_two_words_leaves_it_to_the_usual_ones(tmp_path: Path) -> None:
    library = build(tmp_path, headers=HEADERS, environment={"CXX": "ccache g++", "PATH": str(tmp_path)})
    assert "no C++ compiler (ccache g++, c++, g++, clang++)" in library.reason
    usual = tmp_path / "c++"
    usual.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nfor last; do :; done\necho library > "$last"\n')
    usual.chmod(usual.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path}:{os.environ['PATH']}"
    library = build(tmp_path / "cache", headers=HEADERS, environment={"CXX": "ccache g++", "PATH": path})
    assert library.reason == "compiled by c++"


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = tmp_path / "broken++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such standard" >&2\nexit 1\n')
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    directory = tmp_path / "cache"
    environment = {"CXX": str(broken), "PATH": os.environ["PATH"]}
    library = build(directory, headers=HEADERS, environment=environment)
    assert library.path is None
    assert "no such standard" in library.reason
    assert [path.suffix for path in directory.iterdir()] in ([], [".lock"])


def test_builds_side_by_side_compile_once(tmp_path: Path) -> None:
    counting = tmp_path / "counting++"
    counting.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        f'echo compiled >> {tmp_path}/count\nsleep 0.3\nfor last; do :; done\necho library > "$last"\n'
    )
    counting.chmod(counting.stat().st_mode | stat.S_IXUSR)
    environment = {"CXX": str(counting), "PATH": os.environ["PATH"]}
    paths: list[Path | None] = []

    def ask() -> None:
        paths.append(build(tmp_path / "cache", headers=HEADERS, environment=environment).path)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(set(paths)) == 1
    assert None not in paths
    assert (tmp_path / "count").read_text().split() == ["compiled"]
