"""Parameters survive the disk, and damage is always an ArtifactError that names the directory."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from pipeline.errors import ArtifactError, ParameterError
from pipeline.models.checkpoint import abstract_leaves, load_model, model_leaves, read_parameters, save_parameters
from pipeline.models.registry import describe_config

CONFIG = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 11,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def random_leaves(config=CONFIG, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {
        path: rng.normal(size=leaf.shape).astype(dtype)
        for path, leaf in abstract_leaves(describe_config(config)).items()
    }


@pytest.fixture
def saved(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    leaves = random_leaves()
    save_parameters(tmp_path / "params", leaves)
    return tmp_path, leaves


def test_parameters_come_back_bit_for_bit_with_eleven_layers(saved):
    directory, leaves = saved
    found = model_leaves(load_model(directory, dtype=None))
    assert found.keys() == leaves.keys()
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(found[path], leaf)


def test_leaf_paths_are_the_contract_of_the_converter():
    paths = abstract_leaves(describe_config(CONFIG))
    assert paths["embed_tokens.embedding"].shape == (61, 32)
    assert paths["layers.10.attention.k_proj.kernel"].shape == (32, 16)
    assert paths["layers.0.mlp.down_proj.kernel"].shape == (48, 32)
    assert paths["layers.0.post_attention_norm.scale"].shape == (32,)
    assert paths["lm_head.kernel"].shape == (32, 61)
    assert not any(
        path.startswith("lm_head") for path in abstract_leaves(describe_config({**CONFIG, "tie_word_embeddings": True}))
    )


def test_bfloat16_is_kept_and_can_be_cast(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_parameters(tmp_path / "params", random_leaves(dtype=jnp.bfloat16))
    assert {str(leaf.dtype) for leaf in model_leaves(load_model(tmp_path, dtype=None)).values()} == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in model_leaves(load_model(tmp_path, dtype="float32")).values()} == {"float32"}


def test_missing_surplus_shape_and_dtype_are_all_in_one_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    leaves = random_leaves()
    del leaves["norm.scale"]
    leaves["layers.11.norm.scale"] = np.ones(3, np.float32)
    leaves["lm_head.kernel"] = leaves["lm_head.kernel"].T.copy()
    leaves["layers.2.input_norm.scale"] = leaves["layers.2.input_norm.scale"].astype(np.int32)
    save_parameters(tmp_path / "params", leaves)
    with pytest.raises(ArtifactError) as caught:
        load_model(tmp_path, dtype=None)
    text = str(caught.value)
    assert "4 complaints" in text and str(tmp_path) in text
    for line in (
        "missing: norm.scale",
        "surplus: layers.11.norm.scale",
        "shape: lm_head.kernel is (61, 32), must be (32, 61)",
        "dtype: layers.2.input_norm.scale is int32",
    ):
        assert line in text


def test_every_damaged_file_is_an_artifact_error_or_harmless(saved, tmp_path):
    directory, leaves = saved
    files = [path.relative_to(directory) for path in (directory / "params").rglob("*") if path.is_file()]
    assert len(files) >= 5
    refused = 0
    for name in files:
        for damage in ("truncate", "delete"):
            copy = tmp_path / "damaged"
            shutil.copytree(directory / "params", copy / "params")
            path = copy / name
            if damage == "truncate":
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            else:
                path.unlink()
            try:
                found = read_parameters(copy / "params")
            except ArtifactError as error:
                assert str(copy / "params") in str(error)
                refused += 1
            else:
                assert found.keys() == leaves.keys(), (name, damage)
                for leaf_path, leaf in leaves.items():
                    np.testing.assert_array_equal(found[leaf_path], leaf, err_msg=f"{name} {damage}")
            shutil.rmtree(copy)
    assert refused >= 4


def test_orbax_itself_restores_what_was_saved(saved):
    directory, leaves = saved
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(directory / "params")
    np.testing.assert_array_equal(
        tree["layers"]["10"]["mlp"]["up_proj"]["kernel"], leaves["layers.10.mlp.up_proj.kernel"]
    )


def test_a_directory_without_checkpoint_is_named(tmp_path):
    for directory in (tmp_path / "absent", tmp_path):
        with pytest.raises(ArtifactError, match=str(directory)):
            read_parameters(directory)


def test_abstract_leaves_and_existing_directories_are_refused_when_saving(tmp_path):
    with pytest.raises(ArtifactError, match=r"norm\.scale"):
        save_parameters(tmp_path / "params", abstract_leaves(describe_config(CONFIG)))
    with pytest.raises(ArtifactError, match="exists already"):
        save_parameters(tmp_path, random_leaves())


def test_an_unknown_family_names_the_nearest():
    with pytest.raises(ParameterError, match="did you mean 'llama'"):
        abstract_leaves(describe_config({**CONFIG, "model_type": "lama"}))
