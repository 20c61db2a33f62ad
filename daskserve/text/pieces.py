"""What each token adds to the text, as bytes, for the decoders that real models use.

A full decode puts all tokens together before it looks for characters; streaming cannot wait for
that. Both kinds of decoder below can be taken apart into bytes per token plus spaces to drop at
the start of the text, so that decoding one token costs the same at any length of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from daskserve.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"


class TokenPieces:
    """Bytes of each token, looked up once per token id.

    Parameters
    ----------
    id_to_token
        The vocabulary's text of a token id, None where there is none.
    special_ids
        Tokens that are no part of the text.
    decoder
        The ``decoder`` of ``tokenizer.json``.

    Raises
    ------
    ModelError
        A kind of decoder that cannot be taken apart.
    """

    def __init__(
        self,
        id_to_token: Callable[[int], str | None],
        special_ids: frozenset[int],
        decoder: dict[str, Any] | None,
    ) -> None:
        self._id_to_token = id_to_token
        self._to_bytes, self.num_leading_spaces = _take_apart(decoder)
        self._known: dict[int, bytes] = dict.fromkeys(special_ids, b"")

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._known.get(token_id)
        if piece is None:
            token = self._id_to_token(token_id)
            piece = self._known[token_id] = b"" if token is None else self._to_bytes(token)
        return piece


def _take_apart(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], int]:
    """How one token becomes bytes, and how many spaces the start of the text loses."""
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes, 0
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_word_start(steps[0]):
        if kinds[3:] == []:
            return _sentencepiece_bytes, 0
        if kinds[3:] == ["Strip"] and (steps[3]["content"], steps[3]["stop"]) == (" ", 0):
            return _sentencepiece_bytes, int(steps[3]["start"])
    raise ModelError(
        f"the tokenizer's decoder ({', '.join(kinds) or 'none'}) is neither byte-level nor "
        "SentencePiece with byte fallback; its text cannot be streamed exactly"
    )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _replaces_word_start(step: dict[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": _WORD_START} and step["content"] == " ")


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:  # an added token, written as it is
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace(_WORD_START, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies, as GPT-2 defined it."""
    as_they_are = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in as_they_are]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in as_they_are} | shifted


_BYTE_OF = _byte_alphabet()
