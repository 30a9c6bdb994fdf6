"""Parameters on the disk go to several devices, each process reading what its own devices keep."""

import json

import jax
import numpy as np
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.models.checkpoint import abstract_leaves, load_model, model_leaves, save_parameters
from pipeline.models.decoders.layout import decoder_layout, is_decoder
from pipeline.models.parameter_reader import StoredParameters
from pipeline.models.placement import Layout, PlacedLeaf
from pipeline.models.registry import describe_config

CONFIG = {
    "model_type": "olmo2",  # its norms of queries and keys reach over all heads
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
DESCRIPTION = describe_config(CONFIG)
HEAD_DIM = 6
TENSOR = 4
KEYS = "layers.0.attention.k_proj.kernel"


@pytest.fixture(scope="module")
def leaves():
    rng = np.random.default_rng(4)
    return {path: rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in abstract_leaves(DESCRIPTION).items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory, leaves):
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(CONFIG))
    save_parameters(made / "params", leaves)
    return made


class OfTwoProcesses:
    """A sharding of which this process has the devices `own`, in place of a second process."""

    def __init__(self, indices):
        self._indices = indices

    def addressable_devices_indices_map(self, shape):
        return dict(enumerate(self._indices))


def whole_on_one_device(path, shape, *, config):
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("tensor",)), PartitionSpec())


def test_a_decoder_is_read_into_a_model_with_a_key_value_head_for_each_device(directory, leaves):
    layout = decoder_layout(DESCRIPTION, sharding=whole_on_one_device, tensor=TENSOR)
    stored = layout.stored
    model = load_model(directory, dtype=None, layout=Layout(description=DESCRIPTION, sharding=layout.sharding))
    for path, leaf in model_leaves(model).items():
        np.testing.assert_array_equal(leaf, leaves[path])
    # Virtual head 2 is a copy of stored head 1.
    virtual = (slice(0, 48), slice(2 * HEAD_DIM, 3 * HEAD_DIM))
    assert stored(KEYS, virtual) == (slice(0, 48), slice(HEAD_DIM, 2 * HEAD_DIM))
    assert stored("layers.0.attention.k_norm.scale", virtual[1:]) == (slice(HEAD_DIM, 2 * HEAD_DIM),)
    assert stored("layers.0.attention.q_proj.kernel", virtual) == virtual
    wide = model_leaves(layout.description.abstract())
    assert wide[KEYS].shape == (48, TENSOR * HEAD_DIM)
    assert is_decoder(DESCRIPTION)


def test_a_process_wants_the_stretch_that_its_devices_keep():
    own = [(slice(None), slice(10, 20)), (slice(None), slice(20, 30))]
    layout = Layout(description=DESCRIPTION, sharding=lambda path, shape: OfTwoProcesses(own))
    leaf = PlacedLeaf(path=KEYS, shape=(48, 60), sharding=layout.sharding(KEYS, (48, 60)), layout=layout)
    assert leaf.wanted == (slice(0, 48), slice(10, 30))


def bytes_read(work):
    before = _file_bytes()
    work()
    return _file_bytes() - before


def _file_bytes():
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def test_a_quarter_of_a_leaf_costs_a_quarter_of_its_bytes(tmp_path):
    rows, columns = 1024, 4096
    save_parameters(tmp_path / "params", {"a": np.random.default_rng(0).normal(size=(rows, columns)).astype("float32")})
    stored = StoredParameters.open(tmp_path / "params")
    whole = bytes_read(lambda: list(stored.read_each(["a"])))
    of_columns = bytes_read(lambda: list(stored.read_stretches([("a", (slice(0, rows), slice(0, columns // 4)))])))
    of_rows = bytes_read(lambda: list(stored.read_stretches([("a", (slice(0, rows // 2), slice(0, columns)))])))
    assert whole > 0.9 * 4 * rows * columns  # random numbers are hardly compressed
    assert of_columns < 0.3 * whole
    assert of_rows < 0.6 * whole
