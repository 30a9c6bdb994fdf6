"""A mesh is judged before a process starts."""

import pytest

from pipeline.errors import ParameterError
from pipeline.models.decoders.partition import MeshSize
from pipeline.models.decoders.readers import read_decoder
from pipeline.serving.accelerator.mesh_check import check_mesh

LLAMA = read_decoder(
    {
        "model_type": "llama",
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
)


@pytest.mark.parametrize(
    ("mesh", "gpus"),
    [
        (MeshSize(), 0.0),
        (MeshSize(), 0.25),
        (MeshSize(), 1.0),
        (MeshSize(tensor=4, data=2), 0.0),
        (MeshSize(tensor=2, data=2), 4.0),
        (MeshSize(tensor=4, hosts=2), 2.0),
        (MeshSize(tensor=2, hosts=2), 1.0),
    ],
)
def test_a_mesh_that_fits_is_taken(mesh, gpus):
    check_mesh(mesh, config=LLAMA, slots=8, gpus=gpus, dtype="auto")


@pytest.mark.parametrize(
    ("mesh", "gpus", "says"),
    [
        (MeshSize(tensor=4), 2.0, r"computes on 4 of them; use gpus: 4, or a mesh of 2 devices a host"),
        (MeshSize(), 2.0, r"tensor 1 x data 1 on 1 host\(s\) computes on 1 of them"),
        (MeshSize(tensor=2), 0.5, r"needs 2 GPUs in each process, resources.gpus is 0.5"),
        (MeshSize(tensor=3), 0.0, r"allowed: 1, 2, 4, 8"),
        (MeshSize(data=3), 0.0, r"use slots: 6"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would_do(mesh, gpus, says):
    with pytest.raises(ParameterError, match=says):
        check_mesh(mesh, config=LLAMA, slots=8, gpus=gpus, dtype="auto")


def test_all_complaints_come_at_once():
    with pytest.raises(ParameterError) as caught:
        check_mesh(MeshSize(tensor=3, data=3), config=LLAMA, slots=8, gpus=2.0, dtype="int8")
    assert all(
        word in str(caught.value)
        for word in ("mesh.tensor is 3", "mesh.data is 3", "resources.gpus is 2", "dtype: int8")
    )


def test_a_model_that_is_no_decoder_has_one_device():
    check_mesh(MeshSize(), config=None, slots=8, gpus=1.0, dtype="int8")
    with pytest.raises(ParameterError, match="only decoders of a family"):
        check_mesh(MeshSize(tensor=2), config=None, slots=8, gpus=0.0, dtype="auto")
