"""Leaves reach Orbax one piece at a time, and anything that is not as announced is refused."""

import threading
from functools import partial

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from pipeline.errors import ArtifactError
from pipeline.models.parameter_reader import StoredParameters
from pipeline.models.parameter_writer import AnnouncedLeaf, Piece, write_parameters

LEAVES = {
    "a.kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a.scale": np.float32([1.5]),
    "b.number": np.array(7, np.int64),
    "b.mask": np.array([True, False, True]),
    "b.half": np.arange(6).astype(jnp.bfloat16).reshape(2, 3),
    "c.wide": np.linspace(0, 1, 5),
    "c.phase": np.array([1 + 2j], np.complex64),
}


def announced(leaves=LEAVES):
    return {path: AnnouncedLeaf(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}


def pieces(leaves=LEAVES):
    return [
        Piece(leaves=(path,), num_bytes=2 * leaf.nbytes, make=partial(tuple, (leaf,))) for path, leaf in leaves.items()
    ]


def test_every_dtype_comes_back_bit_for_bit_from_orbax_and_from_the_reader(tmp_path):
    write_parameters(tmp_path / "params", announced=announced(), pieces=pieces())
    stored = StoredParameters.open(tmp_path / "params")
    assert stored.headers == announced()
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "params")
    for path, leaf in LEAVES.items():
        first, second = path.split(".")
        for found in (stored.read(path), np.asarray(tree[first][second])):
            assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype), path
            assert found.tobytes() == leaf.tobytes(), path


def test_pieces_may_come_in_any_order_and_make_several_leaves(tmp_path):
    both = Piece(leaves=("c.phase", "a.kernel"), num_bytes=1, make=lambda: (LEAVES["c.phase"], LEAVES["a.kernel"]))
    rest = [piece for piece in pieces() if piece.leaves[0] not in both.leaves]
    write_parameters(tmp_path / "params", announced=announced(), pieces=[*reversed(rest), both])
    stored = StoredParameters.open(tmp_path / "params")
    assert (stored.read("a.kernel") == LEAVES["a.kernel"]).all()


def test_large_pieces_are_made_one_at_a_time_in_another_thread(tmp_path):
    at_work = threading.Lock()
    seen = []

    def make(leaf):
        assert at_work.acquire(blocking=False)
        seen.append(threading.get_ident() != threading.main_thread().ident)
        at_work.release()
        return (leaf,)

    leaves = {f"leaf{number}": np.full((64, 64), number, np.float32) for number in range(9)}
    made = [Piece(leaves=(path,), num_bytes=2**30, make=partial(make, leaf)) for path, leaf in leaves.items()]
    write_parameters(tmp_path / "params", announced=announced(leaves), pieces=made, buffer_bytes=1)
    assert seen == [True] * 9
    stored = StoredParameters.open(tmp_path / "params")
    assert all((leaf == leaves[path]).all() for path, leaf in stored.read_each(stored.headers))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a.scale": np.float32([1, 2])}, r"a.scale: announced as \(1,\) float32, made as \(2,\) float32"),
        ({"a.scale": np.float64([1])}, r"a.scale: announced as \(1,\) float32, made as \(1,\) float64"),
        ({"a.scale": None}, "announced, but never made: a.scale"),
        ({"z": np.float32([1])}, "z: made twice, or never announced"),
    ],
)
def test_what_is_not_as_announced_is_refused(tmp_path, given, message):
    made = {path: leaf for path, leaf in {**LEAVES, **given}.items() if leaf is not None}
    with pytest.raises(ArtifactError, match=message):
        write_parameters(tmp_path / "params", announced=announced(), pieces=pieces(made))
    assert not (tmp_path / "params").exists()


def test_what_a_piece_raises_comes_through(tmp_path):
    def refuse():
        raise ArithmeticError("of its own")

    work = [*pieces()[:3], Piece(leaves=("b.mask",), num_bytes=1, make=refuse)]
    with pytest.raises(ArithmeticError, match="of its own"):
        write_parameters(tmp_path / "params", announced=announced(), pieces=work)
    assert not (tmp_path / "params").exists()
