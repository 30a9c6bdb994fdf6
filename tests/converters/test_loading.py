"""`load` gives a module of whatever holds its weights, and leaves nothing behind."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import converters
from pipeline.errors import CheckpointError, ConversionError
from pipeline.models.checkpoint import model_leaves

# Two layers of float32 sums in another order, logits of size 10; seen 5e-6.
TOLERANCE = 1e-4


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary directories are made."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_a_checkpoint_is_converted_on_the_way_and_computes_the_same(llama, checkpoint, temporary):
    reference = llama()
    model = converters.load(checkpoint(reference))
    assert list(temporary.iterdir()) == []
    tokens = np.random.default_rng(0).integers(0, 101, (2, 9))
    graph, state = nnx.split(model)
    logits = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, jnp.asarray(tokens))
    expected = reference(torch.from_numpy(tokens)).logits.detach().numpy()
    assert np.abs(np.asarray(logits) - expected).max() < TOLERANCE


def test_a_model_directory_and_its_checkpoint_load_alike(llama, checkpoint, tmp_path):
    source = checkpoint(llama())
    converters.convert(source, to=tmp_path / "flax")
    loaded, direct = (model_leaves(converters.load(path)) for path in (tmp_path / "flax", str(source)))
    assert loaded.keys() == direct.keys()
    for path, leaf in loaded.items():
        assert np.array_equal(leaf, direct[path]), path


def test_a_dtype_is_that_of_every_weight(llama, checkpoint):
    leaves = model_leaves(converters.load(checkpoint(llama()), dtype="bfloat16"))
    assert {str(leaf.dtype) for leaf in leaves.values()} == {"bfloat16"}


def test_what_cannot_be_converted_leaves_nothing_behind(llama, checkpoint, temporary, tmp_path):
    state = {name: value for name, value in llama().state_dict().items() if name != "model.norm.weight"}
    with pytest.raises(ConversionError, match=r"norm\.scale: nothing fills it"):
        converters.load(checkpoint(llama(), state=state))
    with pytest.raises(CheckpointError, match="no such"):
        converters.load(tmp_path / "absent")
    assert list(temporary.iterdir()) == []
