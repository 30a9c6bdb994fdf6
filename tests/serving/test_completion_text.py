"""Chunks add up to the text before the stop string, and log-probabilities lie at their tokens, whatever the steps."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import VOCABULARY

from pipeline.serving.engine.completion_text import Completion
from pipeline.serving.engine.metrics import Metrics
from pipeline.serving.engine.request import FinishReason, Request, Sampling
from pipeline.serving.engine.scheduler import Progress
from pipeline.serving.engine.token_rules import Ranks

END = 0
TEXTS = st.lists(st.integers(1, 285), min_size=1, max_size=30)  # 285 is the tokenizer's last token


def chunks_of(vocabulary, tokens, sizes, *, stop=(), finish=FinishReason.LENGTH, logprobs=None):
    """Feed `tokens` in pieces of these sizes, as the engine does."""
    sampling = Sampling(max_tokens=len(tokens), stop=stop, stop_ids=(END,), logprobs=logprobs)
    request = Request(request_id="a", prompt=(5,), sampling=sampling)
    completion = Completion(request, sink=lambda chunks: None, decoder=vocabulary, arrived_at=0.0)
    chunks, start = [], 0
    sizes = [*sizes, len(tokens)]
    while start < len(tokens) and not (chunks and chunks[-1].finish):
        size = max(1, sizes.pop(0)) if logprobs is None else 1
        new = tuple(tokens[start : start + size])
        start += len(new)
        progress = Progress(request_id="a", tokens=new, finish=finish if start == len(tokens) else None)
        ranks = (
            [] if logprobs is None else [Ranks(-float(token), ((token, -0.5), (END, -2.0))[:logprobs]) for token in new]
        )
        chunks.append(completion.add(progress, ranks=ranks, now=1.0, metrics=Metrics(model="m")))
    return chunks


def text_of(chunks):
    return "".join(chunk.text for chunk in chunks)


@settings(max_examples=120, deadline=None)
@given(tokens=TEXTS, sizes=st.lists(st.integers(1, 5), max_size=30), place=st.integers(0, 40), length=st.integers(1, 4))
def test_the_text_ends_before_the_first_stop_string_whatever_the_steps(vocabulary, tokens, sizes, place, length):
    whole = vocabulary.decode(tokens)
    stop = whole[place : place + length]
    chunks = chunks_of(vocabulary, tokens, sizes, stop=(stop,) if stop else ())
    if stop:
        assert text_of(chunks) == whole[: whole.index(stop)]
        assert chunks[-1].finish is FinishReason.STOP
    else:
        assert text_of(chunks) == whole
        assert chunks[-1].finish is FinishReason.LENGTH
    assert all(chunk.finish is None for chunk in chunks[:-1])


@settings(max_examples=120, deadline=None)
@given(tokens=TEXTS, place=st.integers(0, 40), length=st.integers(0, 3), ends=st.booleans())
def test_log_probabilities_leave_with_their_text(vocabulary, tokens, place, length, ends):
    whole = vocabulary.decode(tokens)
    stop = whole[place : place + length]
    given_tokens = [*tokens, END] if ends else tokens
    finish = FinishReason.STOP if ends else FinishReason.LENGTH
    chunks = chunks_of(vocabulary, given_tokens, [], stop=(stop,) if stop else (), finish=finish, logprobs=2)
    text, entries = text_of(chunks), [entry for chunk in chunks for entry in chunk.logprobs]
    shown = tokens[: len(entries)]
    assert [entry.chosen.token for entry in entries] == shown
    assert [entry.chosen.logprob for entry in entries] == [-float(token) for token in shown]
    for index, entry in enumerate(entries):
        # Of a character that is not whole yet, nothing is there.
        settled = functools.reduce(
            lambda found, _: found.removesuffix("\ufffd"), range(3), vocabulary.decode(tokens[:index])
        )
        assert len(settled) <= entry.text_offset <= len(vocabulary.decode(tokens[:index]))
    if stop:
        assert all(entry.text_offset < len(text) for entry in entries)
    else:
        assert len(entries) == len(tokens)
    sent = 0
    for chunk in chunks[:-1]:
        sent += len(chunk.text)
        assert all(entry.text_offset < sent for entry in chunk.logprobs)


def test_bytes_of_a_character_in_two_tokens_are_each_tokens_own(vocabulary, tokenizer):
    tokens = tokenizer.encode("é").ids
    entries = [entry for chunk in chunks_of(vocabulary, tokens, [], logprobs=1) for entry in chunk.logprobs]
    assert [entry.chosen.bytes for entry in entries] == [b"\xc3", b"\xa9"]
    assert [entry.chosen.text for entry in entries] == ["\ufffd", "\ufffd"]
    assert [entry.text_offset for entry in entries] == [0, 0]


def test_a_special_token_has_a_name_and_no_bytes(vocabulary):
    assert vocabulary.spelled(END) == ("<|end|>", b"")
    assert vocabulary.spelled(VOCABULARY - 1) == ("", b"")


def test_every_byte_has_a_token_that_is_spelled_as_that_byte(tokenizer, vocabulary):
    singles = [vocabulary.spelled(token) for token, name in enumerate_names(tokenizer) if len(name) == 1]
    assert sorted(encoded for _, encoded in singles) == [bytes([value]) for value in range(256)]
    assert all(text == encoded.decode(errors="replace") for text, encoded in singles)


def enumerate_names(tokenizer):
    return sorted((token, name) for name, token in tokenizer.get_vocab().items())
