"""`/v1/predict` answers as it was asked, and refuses everything else before anything runs."""

import asyncio
import io
import json
import tracemalloc
import zipfile

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from httpx import ASGITransport

from pipeline.errors import ParameterError
from pipeline.serving.engine.forward_executor import ForwardExecutor, ForwardShapes, InputForm, batch_sizes
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.micro_batcher import BatchLimits, MicroBatcher
from pipeline.serving.engine.passes import PassShapes
from pipeline.serving.http.http import make_app
from pipeline.serving.http.predict_http import PredictSurface
from pipeline.serving.http.predict_request import PredictModel, parse_prediction
from pipeline.serving.json_body import Rejected

FORMS = {"pixels": InputForm(shape=(2, 3), dtype="float32"), "kind": InputForm(shape=(), dtype="int64")}
TOLERANCE = 1e-6
"""The same float32 products in batches of other sizes; seen 2e-7."""


class Small(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layer = nnx.Linear(6, 4, rngs=rngs)
        self.embed = nnx.Embed(5, 4, rngs=rngs)


def forward(module, inputs):
    x = module.layer(inputs["pixels"].reshape(inputs["pixels"].shape[0], -1)) + module.embed(inputs["kind"])
    return {"logits": jnp.log(x - x.min(axis=1, keepdims=True) + inputs["pixels"][:, 0, :1]), "top": x.argmax(axis=1)}


@pytest.fixture(scope="module")
def served():
    """A module, its warm batcher and its surface."""
    module = Small()
    shapes = ForwardShapes(inputs=FORMS, passes=PassShapes(batches=batch_sizes(8)))
    executor = ForwardExecutor(
        nnx.clone(module), forward=forward, shapes=shapes, device=jax.devices("cpu")[0], dtype="float32"
    )
    limits = BatchLimits(max_batch_rows=8, wait_seconds=0.002, max_waiting_rows=100)
    engine = MicroBatcher(executor, limits=limits, metrics=Metrics(model="small"), strict=True)
    engine.start(timeout_seconds=60)
    model = PredictModel(name="small", inputs=FORMS, outputs=executor.outputs, max_rows=50)
    yield module, PredictSurface(engine=engine, model=model, facts={"name": "small", "digest": "d"})
    engine.stop(drain_seconds=1.0)


@pytest.fixture
def post(served):
    """`post(content, content_type)`; the answer of `/v1/predict`."""

    def send(content: bytes, content_type: str = "application/json", **headers: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = ASGITransport(app=make_app(served[1]))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                sent = {"content-type": content_type, **headers} if content_type else headers
                return await client.post("/v1/predict", content=content, headers=sent)

        return asyncio.run(ask())

    return send


def rows(num: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return {
        "pixels": rng.uniform(1, 2, size=(num, 2, 3)).astype(np.float32),
        "kind": rng.integers(0, 5, size=num).astype(np.int64),
    }


def as_json(inputs, **fields) -> bytes:
    return json.dumps({"inputs": {name: array.tolist() for name, array in inputs.items()}, **fields}).encode()


def as_npz(inputs) -> bytes:
    file = io.BytesIO()
    np.savez(file, **inputs)
    return file.getvalue()


@pytest.mark.parametrize("num", [1, 3, 8, 21])
def test_json_and_npz_give_what_the_module_gives(served, post, num: int) -> None:
    inputs = rows(num)
    expected = forward(served[0], {name: jnp.asarray(array) for name, array in inputs.items()})
    answer = post(as_json(inputs, model="small")).json()
    assert (answer["object"], answer["model"]) == ("prediction", "small")
    np.testing.assert_allclose(answer["outputs"]["logits"], expected["logits"], rtol=TOLERANCE, atol=TOLERANCE)
    assert answer["outputs"]["top"] == expected["top"].tolist()
    packed = post(as_npz(inputs), "application/x-npz")
    assert packed.headers["content-type"] == "application/x-npz"
    with np.load(io.BytesIO(packed.content)) as arrays:
        assert arrays["logits"].dtype == np.float32
        np.testing.assert_allclose(arrays["logits"], expected["logits"], rtol=TOLERANCE, atol=TOLERANCE)


def test_accept_decides_the_form_of_the_answer(post) -> None:
    answer = post(as_json(rows(2)), accept="application/x-npz, */*")
    with np.load(io.BytesIO(answer.content)) as arrays:
        assert arrays["top"].shape == (2,)
    assert post(as_npz(rows(2)), "application/x-npz", accept="application/json").json()["outputs"]["top"]
    assert post(as_json(rows(2)), accept="text/html").status_code == 406
    refused = post(as_json(rows(2)), accept="application/x-npy")
    assert refused.status_code == 406 and "logits, top" in refused.json()["error"]["message"]


def test_requests_at_the_same_time_share_passes_and_keep_their_rows(served) -> None:
    module, surface = served
    before = surface.engine.metrics.value("batches_total")

    async def ask_all():
        transport = ASGITransport(app=make_app(surface))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(
                *(client.post("/v1/predict", content=as_json(rows(2, seed=seed))) for seed in range(20))
            )

    for seed, answer in enumerate(asyncio.run(ask_all())):
        expected = forward(module, {name: jnp.asarray(array) for name, array in rows(2, seed=seed).items()})
        np.testing.assert_allclose(
            answer.json()["outputs"]["logits"], expected["logits"], rtol=TOLERANCE, atol=TOLERANCE
        )
    assert surface.engine.metrics.value("batches_total") - before < 20
    assert surface.engine.status().num_compiles_while_serving == 0


GOOD = {"pixels": rows(1)["pixels"].tolist(), "kind": [0]}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"pixels": GOOD["pixels"]}, "kind: missing"),
        (GOOD | {"pixls": [1]}, "did you mean 'pixels'"),
        (GOOD | {"pixels": [[1, 2], [3]]}, "its lists have different lengths"),
        (GOOD | {"pixels": [[1, 2, 3]]}, r"shape [1, 3]; must be [rows, 2, 3]"),
        (GOOD | {"pixels": "abc"}, "must be a nested list"),
        (GOOD | {"pixels": [[["a", "b", "c"]] * 2]}, "something else than numbers"),
        (GOOD | {"pixels": [[[True, False, True]] * 2]}, "holds booleans; must be float32"),
        (GOOD | {"pixels": [[[1e39, 0, 0]] * 2]}, "are not finite in float32, the first in row 0"),
        (GOOD | {"pixels": [[[None, 0, 0]] * 2]}, "something else than numbers"),
        (GOOD | {"kind": [1.5]}, "holds floats; must be int64"),
        (GOOD | {"kind": [2**40]}, "numbers must be from -2147483648"),
        (GOOD | {"kind": [0, 1]}, "different numbers of rows: pixels 1, kind 2"),
        ({"pixels": [], "kind": []}, "must be [rows, 2, 3]"),
        ({"pixels": GOOD["pixels"] * 51, "kind": [0] * 51}, "51 rows; a request has 1 to 50"),
        ([1], "must be an object of arrays by name"),
    ],
)
def test_wrong_inputs_are_a_400_with_the_reason(post, inputs, words: str) -> None:
    answer = post(json.dumps({"inputs": inputs}).encode())
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_everything_that_is_wrong_is_said_at_once(post) -> None:
    message = post(b'{"inputs": {"pixels": [[[1]]], "kinds": [1]}}').json()["error"]["message"]
    for words in ("kinds: unknown field", "kind: missing", "pixels: shape"):
        assert words in message


@pytest.mark.parametrize(
    ("content", "content_type", "status", "words"),
    [
        (b"{", "", 400, "not JSON"),
        (b'{"inputs": {"pixels": [[[NaN, 0, 0]]], "kind": [0]}}', "application/json", 400, "NaN is no number"),
        (b'{"model": "other", "inputs": {}}', "application/json", 404, "does not exist"),
        (b'{"inputs": {}, "input": 1}', "application/json", 400, "did you mean 'inputs'"),
        (b"x", "text/plain", 415, "application/x-npz"),
        (b"\x93NUMPY", "application/x-npy", 400, "holds one array"),
        (b"PK", "application/x-npz", 400, "no .npz file"),
        (b"x" * (33 * 2**20), "application/json", 413, "are allowed"),
    ],
)
def test_bodies_that_cannot_be_read_are_refused(post, content, content_type, status, words) -> None:
    answer = post(content, content_type)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def damaged_npz(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pixels.npy", content)
    return file.getvalue()


def header(text: str) -> bytes:
    line = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no array", "no .npy array"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}"), "bytes follow"),
        (header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}") + b"cos\nsystem\n", "dtype object"),
        (header("__import__('os').getpid()"), "no .npy array"),
        (b"\0" * (40 * 2**20), "unpacks to"),
    ],
)
def test_hostile_arrays_are_refused_without_being_made(post, content: bytes, words: str) -> None:
    answer = post(damaged_npz(content), "application/x-npz")
    assert answer.status_code in (400, 413)
    assert words in answer.json()["error"]["message"]


def test_an_archive_that_is_damaged_or_packed_otherwise_is_refused(post) -> None:
    packed = damaged_npz(rows(1)["pixels"].tobytes())
    start = packed.index(b"pixels.npy") + len("pixels.npy")
    answer = post(packed[:start] + b"\xff" * 8 + packed[start + 8 :], "application/x-npz")
    assert answer.status_code == 400
    assert "no .npz file" in answer.json()["error"]["message"]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("pixels.npy", bytes(64))
    answer = post(file.getvalue(), "application/x-npz")
    assert answer.status_code == 400
    assert "as numpy packs no .npz file" in answer.json()["error"]["message"]


def test_an_archive_that_understates_its_size_is_not_unpacked(served) -> None:
    size = 64 * 2**20
    packed = damaged_npz(bytes(size)).replace(size.to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    tracemalloc.start()
    with pytest.raises(Rejected, match=r"no \.npz file"):
        parse_prediction(packed, content_type="application/x-npz", accept="", model=served[1].model)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**20


def test_numbers_that_json_cannot_write_are_an_error_of_that_request_alone(post) -> None:
    inputs = rows(2)
    inputs["pixels"][0, 0, 0] = -100.0  # the logarithm of a negative number
    answer = post(as_json(inputs))
    assert answer.status_code == 500
    assert "not finite in logits" in answer.json()["error"]["message"]
    with np.load(io.BytesIO(post(as_npz(inputs), "application/x-npz").content)) as arrays:
        assert np.isnan(arrays["logits"][0]).any()
    assert post(as_json(rows(2))).status_code == 200


def test_the_card_says_how_to_ask_and_the_other_routes_answer(served) -> None:
    async def ask():
        transport = ASGITransport(app=make_app(served[1]))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.get(path) for path in ("/v1/models/small", "/health", "/ready", "/metrics", "/v1/x")]

    card, health, ready, metrics, missing = asyncio.run(ask())
    assert card.json()["inputs"]["pixels"] == {"shape": ["rows", 2, 3], "dtype": "float32"}
    assert card.json()["outputs"] == {"logits": {"shape": ["rows", 4]}, "top": {"shape": ["rows"]}}
    assert health.json()["digest"] == "d" and ready.json() == {"ready": True}
    assert 'compile_events_total{model_name="small",phase="warmup"} 3' in metrics.text
    assert missing.status_code == 404 and "error" in missing.json()


def test_a_model_whose_outputs_have_no_rows_is_not_served() -> None:
    shapes = ForwardShapes(inputs=FORMS, passes=PassShapes(batches=(2,)))
    with pytest.raises(ParameterError, match="outputs without a batch axis: sum"):
        ForwardExecutor(
            Small(),
            forward=lambda module, inputs: {"sum": inputs["pixels"].sum(), "kind": inputs["kind"]},
            shapes=shapes,
            device=jax.devices("cpu")[0],
            dtype="float32",
        )
