import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.models import resolve
from daskserve.text import Detokenizer, Tokenizer

TOKENIZER = Tokenizer.load(resolve("mock"))
token_ids = st.lists(st.integers(0, TOKENIZER.vocab_size + 5), max_size=40)
# A small alphabet, so that stop strings do occur, across the borders of tokens too.
short_texts = st.text("ab 😀ď", min_size=1, max_size=30)
stops = st.lists(st.text("ab 😀ď", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    return Tokenizer.load(smollm2_dir)


def stream(tokenizer, ids, stop=()):
    """The pieces that a caller would see, one per token, and the rest."""
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.flush())
    assert detokenizer.text == "".join(pieces)
    return pieces


def cut(text, stop):
    """``text`` before the stop string that is complete first."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    return text[: min(ends)[1]] if ends else text


@given(token_ids)
def test_pieces_join_to_the_full_decode_of_any_tokens(full_decode, ids):
    assert "".join(stream(TOKENIZER, ids)) == full_decode(TOKENIZER, ids)


@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_pieces_of_the_default_model_join_to_the_full_decode(smollm2, full_decode, ids):
    assert "".join(stream(smollm2, ids)) == full_decode(smollm2, ids)


@given(short_texts, stops)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(text, stop):
    assert "".join(stream(TOKENIZER, TOKENIZER.encode(text), stop)) == cut(text, stop)


@given(short_texts, stops)
def test_what_was_sent_is_never_taken_back(text, stop):
    pieces = stream(TOKENIZER, TOKENIZER.encode(text), stop)
    final = cut(text, stop)
    for end in range(len(pieces)):
        assert final.startswith("".join(pieces[:end]))


@given(st.text(min_size=1, max_size=30), stops)
def test_no_more_is_held_back_than_a_stop_string_could_need(text, stop):
    detokenizer = Detokenizer(TOKENIZER, stop)
    arrived = b""
    for token_id in TOKENIZER.encode(text):
        arrived += TOKENIZER.pieces[token_id]
        detokenizer.push(token_id)
        if detokenizer.stopped:
            return
        held = arrived.decode(errors="ignore")[len(detokenizer.text) :]
        assert not held or any(one.startswith(held) for one in stop)


def test_multi_byte_characters_arrive_whole_and_early(smollm2):
    text = "hi 😀 ď 日本語 🇫🇷"
    ids = smollm2.encode(text)
    pieces = stream(smollm2, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[0] == "hi"


def test_a_stop_string_of_several_tokens_never_leaks(smollm2):
    ids = smollm2.encode("ABCDEFGHIJKLM")
    assert "".join(stream(smollm2, ids, ("DEFGHIJ",))) == "ABC"


def test_a_stop_string_that_never_comes_changes_nothing(smollm2):
    ids = smollm2.encode("one ✿ two ✿NEV three ✿NEVE 😀")
    assert "".join(stream(smollm2, ids, ("✿NEVER✿",))) == "".join(stream(smollm2, ids))


def test_an_unfinished_character_becomes_a_replacement_only_at_the_end(full_decode):
    ids = TOKENIZER.encode("ok 😀")[:-1]
    assert stream(TOKENIZER, ids)[-3:] == ["", "", "\ufffd"]
    assert full_decode(TOKENIZER, ids) == "ok \ufffd"


def test_after_a_stop_nothing_more_is_emitted():
    detokenizer = Detokenizer(TOKENIZER, ("b",))
    assert [detokenizer.push(i) for i in TOKENIZER.encode("aba")] == ["a", "", ""]
    assert (detokenizer.stopped, detokenizer.flush(), detokenizer.text) == (True, "", "a")


def test_special_tokens_are_no_text():
    ids = [*TOKENIZER.encode("a"), 1, 2, *TOKENIZER.encode("b")]
    assert stream(TOKENIZER, ids, ("<|im_end|>",)) == ["a", "", "", "b", ""]


@pytest.mark.parametrize("num_stops", [1, 16])
def test_a_long_answer_with_many_stop_strings_is_still_exact(num_stops):
    text = "abcabd " * 500
    stop = tuple("abcabdx"[: 7 - n % 3] + "#" * n for n in range(1, num_stops + 1))
    assert "".join(stream(TOKENIZER, TOKENIZER.encode(text), stop)) == text
