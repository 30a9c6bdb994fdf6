"""Equal is what both models had to compute the same way."""

import base64
import io
import json

import numpy as np
import pytest

from pipeline.serving.traffic.traffic_comparison import Comparison, compare, is_greedy, texts

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = json.dumps({"model": "m", "prompt": "a", "temperature": 0}).encode()


def plain(*said):
    return json.dumps({"id": "x", "choices": [{"index": i, "text": text} for i, text in enumerate(said)]}).encode()


def streamed(*parts):
    events = [json.dumps({"choices": [{"index": i, "text": text}]}) for i, text in parts]
    return "".join(f"data: {event}\n\n" for event in [*events, '{"choices": [], "usage": {}}', "[DONE]"]).encode()


def test_greedy_texts_are_equal_letter_by_letter_however_they_were_cut():
    one, other = streamed((0, "he"), (1, "b"), (0, "y")), streamed((1, "b"), (0, "hey"))
    assert compare(COMPLETIONS, asked=GREEDY, champion=one, challenger=other) == Comparison(is_equal=True)
    assert compare(COMPLETIONS, asked=GREEDY, champion=plain("hey", "b"), challenger=one).is_equal is True
    assert compare(COMPLETIONS, asked=GREEDY, champion=plain("hey"), challenger=plain("hex")).is_equal is False


def test_sampled_texts_say_nothing():
    asked = json.dumps({"prompt": "a", "temperature": 0.7}).encode()
    assert not compare(COMPLETIONS, asked=asked, champion=plain("a"), challenger=plain("b")).is_comparable
    assert is_greedy(b'{"top_k": 1}') and not is_greedy(b'{"prompt": "a"}') and not is_greedy(b"[0]")


def test_chat_answers_are_compared_with_their_tool_calls_but_not_their_ids():
    def message(identity, arguments):
        call = {"id": identity, "function": {"name": "f", "arguments": arguments}}
        return json.dumps({"choices": [{"index": 0, "message": {"content": None, "tool_calls": [call]}}]}).encode()

    def delta(*parts):
        return "".join(f"data: {json.dumps({'choices': [{'delta': part}]})}\n\n" for part in parts).encode()

    assert compare(CHAT, asked=GREEDY, champion=message("1", "{}"), challenger=message("2", "{}")).is_equal is True
    assert compare(CHAT, asked=GREEDY, champion=message("1", "{}"), challenger=message("1", "[]")).is_equal is False
    assert texts(delta({"role": "assistant"}, {"content": "a"}, {"content": "b"})) == {0: "ab"}


def test_embeddings_are_compared_by_cosine_as_numbers_or_base64():
    one, other = np.asarray([3.0, 4.0, 0.0]), np.asarray([4.0, 3.0, 0.0])
    numbers = json.dumps({"data": [{"embedding": one.tolist()}, {"embedding": [1.0, 0, 0]}]}).encode()
    packed = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in (other, np.asarray([2.0, 0, 0]))]
    coded = json.dumps({"data": [{"embedding": text} for text in packed]}).encode()
    found = compare("/v1/embeddings", asked=b"{}", champion=numbers, challenger=coded)
    assert found.cosines == pytest.approx([0.96, 1.0])
    fewer = json.dumps({"data": [{"embedding": one.tolist()}]}).encode()
    assert compare("/v1/embeddings", asked=b"{}", champion=numbers, challenger=fewer).is_equal is False


def test_predictions_are_compared_by_their_largest_difference():
    def npz(**arrays):
        file = io.BytesIO()
        np.savez(file, **arrays)
        return file.getvalue()

    def npy(array):
        file = io.BytesIO()
        np.save(file, array)
        return file.getvalue()

    body = json.dumps({"outputs": {"y": [[1.0, 2.0]], "z": [1]}}).encode()
    near = json.dumps({"outputs": {"y": [[1.0, 2.5]], "z": [1]}}).encode()
    path, asked = "/v1/predict", b"\x93NUMPY"
    assert compare(path, asked=asked, champion=body, challenger=near).max_abs_error == 0.5
    assert compare(path, asked=asked, champion=npz(y=np.ones(3)), challenger=npz(y=np.zeros(3))).max_abs_error == 1.0
    assert compare(path, asked=asked, champion=npy(np.ones(3)), challenger=npy(np.ones(3))).max_abs_error == 0.0
    assert compare(path, asked=asked, champion=npy(np.ones(3)), challenger=npy(np.ones(4))).is_equal is False
    lost = npy(np.asarray([1.0, np.nan, 1.0]))
    assert compare(path, asked=asked, champion=npy(np.ones(3)), challenger=lost).max_abs_error == float("inf")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings", "/v1/predict"])
@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"{}", b'{"choices": 3}', b"PK\x03\x04", b"\x93NUMPY", b"data: "]
)
def test_what_is_no_answer_is_a_difference_and_no_crash(path, body):
    good = {COMPLETIONS: plain("a"), CHAT: plain("a")}.get(
        path, json.dumps({"data": [], "outputs": {"y": [1]}}).encode()
    )
    found = compare(path, asked=GREEDY, champion=good, challenger=body)
    assert found.is_equal is False
