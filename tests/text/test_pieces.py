import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from daskserve.errors import ModelError
from daskserve.text.detokenizer import Detokenizer
from daskserve.text.pieces import TokenPieces

WORDS = ["<unk>", "<s>", "</s>", "▁", "▁the", "▁a", "a", "b", "ab", "▁▁", "é", "."]
VOCAB = WORDS + [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(strip):
    """A tokenizer like Llama 2's (strip 1) or Gemma's (strip 0)."""
    vocab = {token: index for index, token in enumerate(VOCAB)}
    rust = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence(steps + [decoders.Strip(" ", strip, 0)] * bool(strip))
    rust.add_special_tokens(["<s>", "</s>"])
    return rust


class Text:
    """What the detokenizer needs of a tokenizer."""

    def __init__(self, rust):
        decoder = json.loads(rust.to_str())["decoder"]
        self.pieces = TokenPieces(rust.id_to_token, frozenset({1, 2}), decoder)

    def decode(self, ids):
        detokenizer = Detokenizer(self)
        return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


RUSTS = {strip: sentencepiece(strip) for strip in (0, 1, 2)}
words = st.integers(0, len(WORDS) - 1).map(lambda index: [index])
characters = st.characters(codec="utf-8").map(
    lambda char: [VOCAB.index(f"<0x{byte:02X}>") for byte in char.encode()]
)


@pytest.mark.parametrize("strip", RUSTS)
@given(pieces=st.lists(words | characters, max_size=20))
def test_sentencepiece_pieces_join_to_the_full_decode(strip, pieces):
    ids = [token_id for piece in pieces for token_id in piece]
    assert Text(RUSTS[strip]).decode(ids) == RUSTS[strip].decode(ids)


def test_spaces_between_words_are_kept_and_the_first_is_dropped():
    ids = [VOCAB.index(token) for token in ("<s>", "▁the", "▁a", "b", "▁▁", "a")]
    assert Text(RUSTS[1]).decode(ids) == "the ab  a"


def test_a_whole_character_before_a_broken_one_is_kept():
    """The library would replace the whole run of byte tokens; a stream has sent it already."""
    bytes_ = "é".encode() + b"\xf0\x9f"
    ids = [VOCAB.index(f"<0x{byte:02X}>") for byte in bytes_]
    assert Text(RUSTS[0]).decode(ids) == "é\ufffd"


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_decoder_that_cannot_be_streamed_exactly_is_refused(decoder):
    with pytest.raises(ModelError, match="cannot be streamed exactly"):
        TokenPieces(str, frozenset(), decoder)


def test_added_tokens_with_spaces_are_written_as_they_are():
    pieces = TokenPieces({5: "<a b>"}.get, frozenset(), {"type": "ByteLevel"})
    assert (pieces[5], pieces[6]) == (b"<a b>", b"")
