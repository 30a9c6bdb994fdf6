"""`/v1/embeddings` gives the vectors that the model's own files describe, in OpenAI's shapes."""

import asyncio
import base64
import json

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from httpx import ASGITransport
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pipeline.errors import ArtifactError, ParameterError
from pipeline.models.checkpoint import abstract_leaves, load_model, save_parameters
from pipeline.models.registry import describe, describe_config
from pipeline.serving.engine.pooling import Pooling
from pipeline.serving.hosting.replica import Replica
from pipeline.serving.replica_settings import ReplicaSettings

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{index}" for index in range(97))]
CONFIG = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": len(WORDS),
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
TOLERANCE = 2e-5
"""The same float32 sums over other paddings and batches; seen 1e-6."""


def write_pooling(directory, modules=MODULES, **config):
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    given = {
        "word_embedding_dimension": 24,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        **config,
    }
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(given))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("encoder")
    rng = np.random.default_rng(0)
    leaves = {
        name: rng.normal(size=leaf.shape, scale=0.3).astype(np.float32)
        for name, leaf in abstract_leaves(describe_config(CONFIG)).items()
    }
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_parameters(path / "params", leaves)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    write_pooling(path)
    return path


def settings(directory, **given):
    return ReplicaSettings(
        **{
            "name": "words",
            "model_path": str(directory),
            "digest": "d",
            "version": "1",
            "deployment_id": "x",
            "slots": 1,
            "context": None,
            "prefill_chunk_tokens": 16,
            "decode_steps": 1,
            "max_batch_rows": 2,
            **given,
        }
    )


@pytest.fixture(scope="module")
def replica(directory):
    made = Replica.of(settings(directory))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def expected(directory):
    """`expected(tokens)`: the mean over a text's own tokens, of length 1; without any padding."""
    description, module = describe(directory), load_model(directory, dtype="float32")
    run = nnx.jit(lambda module, ids: description.forward(module, {"input_ids": ids})["last_hidden_state"])

    def vector(tokens):
        mean = np.asarray(run(module, jnp.asarray([tokens], jnp.int32)))[0].mean(axis=0)
        return mean / np.linalg.norm(mean)

    return vector


def ask(replica, *bodies, path="/v1/embeddings"):
    async def send():
        transport = ASGITransport(app=replica.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    return asyncio.run(send())


def test_texts_become_the_normalized_mean_of_their_tokens(replica, expected) -> None:
    texts = ["w1 w2 w3", " ".join(f"w{index}" for index in range(30)), "w7"]
    (answer,) = ask(replica, {"model": "words", "input": texts, "user": "me"})
    body = answer.json()
    assert (body["object"], body["model"]) == ("list", "words")
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    assert body["usage"] == {"prompt_tokens": 5 + 32 + 3, "total_tokens": 40}
    for text, item in zip(texts, body["data"], strict=True):
        tokens = [1, *(WORDS.index(word) for word in text.split()), 2]
        np.testing.assert_allclose(item["embedding"], expected(tokens), atol=TOLERANCE)


def test_strings_lists_tokens_and_base64_agree(replica) -> None:
    tokens = [1, WORDS.index("w4"), WORDS.index("w9"), 2]
    answers = ask(
        replica,
        {"model": "words", "input": "w4 w9"},
        {"model": "words", "input": tokens},
        {"model": "words", "input": [tokens], "dimensions": 24},
        {"model": "words", "input": ["w4 w9"], "encoding_format": "base64"},
    )
    vectors = [answer.json()["data"][0]["embedding"] for answer in answers]
    unpacked = np.frombuffer(base64.b64decode(vectors[3]), "<f4")
    assert unpacked.shape == (24,)
    for vector in vectors[:3]:
        np.testing.assert_allclose(vector, unpacked, atol=TOLERANCE)


def test_many_clients_get_their_own_vectors_without_a_compile(replica, expected) -> None:
    texts = [[1, *range(4 + index, 4 + index + length), 2] for index in range(8) for length in (1, 14, 30)]
    answers = ask(replica, *({"model": "words", "input": text} for text in texts))
    for text, answer in zip(texts, answers, strict=True):
        np.testing.assert_allclose(answer.json()["data"][0]["embedding"], expected(text), atol=TOLERANCE)
    status = replica.only.served.engine.status()
    assert (status.num_compiles_while_serving, status.failure) == (0, None)


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"input": None}, 400, "input: missing"),
        ({"input": ""}, 400, "item 0 is empty"),
        ({"input": []}, 400, "must be a string, a list of strings, or tokens"),
        ({"input": ["w1", 3]}, 400, "item 1 must be a string or a list of tokens"),
        ({"input": [[]]}, 400, "item 0 must be"),
        ({"input": [1, 101]}, 400, "has token 101; the model has 0 to 100"),
        ({"input": [True]}, 400, "item 0 must be"),
        ({"input": "w1 " * 39}, 400, "has 41 tokens; the model reads 40"),
        ({"input": ["w1"] * 2049}, 400, "2048 are allowed"),
        ({"encoding_format": "int8"}, 400, "must be one of float, base64"),
        ({"dimensions": 12}, 400, "have 24 numbers, and are not shortened"),
        ({"dimension": 24}, 400, "did you mean 'dimensions'"),
        ({"model": "other"}, 404, "does not exist"),
    ],
)
def test_wrong_bodies_are_refused_with_the_reason(replica, fields, status: int, words: str) -> None:
    (answer,) = ask(replica, {"model": "words", "input": "w1", **fields})
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_the_replica_says_how_it_pools(replica) -> None:
    assert replica.only.facts["endpoint"] == "embeddings"
    assert replica.only.facts["pooling"] == "mean_tokens, normalized"
    assert (replica.only.facts["dimensions"], replica.only.facts["context_tokens"]) == (24, 40)
    assert ask(replica, {}, path="/v1/completions")[0].status_code == 404


def test_a_longer_context_than_the_models_is_refused(directory) -> None:
    with pytest.raises(ParameterError, match="max_context_tokens is 64, but the model was made for 40"):
        Replica.of(settings(directory, context=64))


def test_pooling_is_what_the_files_say(tmp_path) -> None:
    assert Pooling.read(tmp_path) == Pooling()
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    write_pooling(tmp_path, pooling_mode_cls_token=True)
    found = Pooling.read(tmp_path)
    assert (found.modes, found.is_normalized, found.max_tokens) == (("cls_token", "mean_tokens"), True, 16)
    write_pooling(tmp_path, MODULES[:2])
    assert not Pooling.read(tmp_path).is_normalized


@pytest.mark.parametrize(
    ("modules", "config", "words"),
    [
        ([*MODULES, {"type": "sentence_transformers.models.Dense", "path": "2"}], {}, "models.Dense"),
        (MODULES, {"pooling_mode_lasttoken": True}, "the pooling mode lasttoken"),
        (MODULES[:1], {}, "no pooling"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, modules, config, words: str) -> None:
    write_pooling(tmp_path, modules, **config)
    with pytest.raises(ParameterError, match=words):
        Pooling.read(tmp_path)


def test_damaged_pooling_files_are_named(tmp_path) -> None:
    write_pooling(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"1_Pooling/config\.json: cannot be read"):
        Pooling.read(tmp_path)
    (tmp_path / "modules.json").write_text("[3]")
    with pytest.raises(ArtifactError, match="not a list of modules"):
        Pooling.read(tmp_path)
    write_pooling(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text("[16]")
    with pytest.raises(ArtifactError, match=r"sentence_bert_config\.json: must be a JSON object"):
        Pooling.read(tmp_path)


@pytest.mark.parametrize("mode", ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens"])
def test_padding_counts_for_nothing(mode: str) -> None:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(2, 5, 3)).astype(np.float32)
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = np.asarray(Pooling(modes=(mode,))(jnp.asarray(hidden), jnp.asarray(mask)))
    real = [hidden[0, :3], hidden[1]]
    by_hand = {
        "cls_token": [text[0] for text in real],
        "max_tokens": [text.max(axis=0) for text in real],
        "mean_tokens": [text.mean(axis=0) for text in real],
        "mean_sqrt_len_tokens": [text.sum(axis=0) / np.sqrt(len(text)) for text in real],
    }[mode]
    np.testing.assert_allclose(found, np.stack(by_hand), atol=TOLERANCE)
