"""Pieces of text always add up to the text of all tokens, and stop strings never leak."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.serving.engine.detokenizer import REPLACEMENT, Detokenizer, StopStrings

TEXTS = ["def main():\n    return 1", "naïve café — 東京 🙂🙂 👩‍👩‍👧 \u0000 end", "\u00a0\u2028x", "🙂", ""]


def pieces_of(tokenizer, tokens, sizes):
    detokenizer = Detokenizer(tokenizer)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(detokenizer.add(tokens[start : start + size]))
        start += size
    pieces.append(detokenizer.add(tokens[start:]))
    pieces.append(detokenizer.finish())
    return pieces


@pytest.mark.parametrize("text", TEXTS)
def test_one_token_at_a_time_adds_up_and_no_half_character_is_sent(tokenizer, text):
    tokens = tokenizer.encode(text).ids
    pieces = pieces_of(tokenizer, tokens, [1] * len(tokens))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(st.integers(1, 300), max_size=40), sizes=st.lists(st.integers(0, 5), max_size=20))
def test_any_tokens_in_any_steps_add_up_to_the_whole(tokenizer, tokens, sizes):
    assert "".join(pieces_of(tokenizer, tokens, sizes)) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_bytes_that_never_become_a_character_are_sent_at_the_end(tokenizer):
    tokens = tokenizer.encode("🙂").ids[:2]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add(tokens) == ""
    assert detokenizer.finish() == tokenizer.decode(tokens) != ""


def test_a_stop_string_across_pieces_is_found_and_cut():
    stops = StopStrings(["END", "\n\n"])
    assert [stops.add(piece) for piece in ("ab E", "N", "x E", "ND more")] == ["ab ", "", "ENx ", ""]
    assert stops.is_hit


def test_text_that_only_began_like_a_stop_string_is_sent_at_the_end():
    stops = StopStrings(["<stop>"])
    assert stops.add("text <sto") == "text "
    assert stops.finish() == "<sto" and not stops.is_hit


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.text("ab", max_size=4), max_size=12), stop=st.text("ab", min_size=1, max_size=4))
def test_the_text_before_the_first_stop_string_is_sent_whatever_the_pieces(pieces, stop):
    stops = StopStrings([stop])
    sent = ""
    for piece in pieces:
        sent += stops.add(piece)
        if stops.is_hit:
            break
    else:
        sent += stops.finish()
    whole = "".join(pieces)
    assert sent == (whole[: whole.index(stop)] if stop in whole else whole)
    assert stops.is_hit == (stop in whole)
