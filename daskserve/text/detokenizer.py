"""Text of an answer while its tokens arrive: whole characters, nothing of a stop string.

One ``Detokenizer`` per request, on the instance that samples its tokens; the text that it gives
out piece by piece is the text of the full decode.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daskserve.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns token ids into text as early as it is safe.

    Held back are only the bytes of an unfinished character and text that may be the beginning
    of a stop string. The text ends before the stop string that is complete first.

    Parameters
    ----------
    tokenizer
        Of the model that the tokens come from.
    stop
        Strings that end the text; not part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._pieces = tokenizer.pieces
        self._num_spaces_to_drop = tokenizer.pieces.num_leading_spaces
        self._decoder = _Utf8Decoder("replace")
        self._stop = stop
        self._held = ""
        self._emitted: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All text emitted so far."""
        if len(self._emitted) > 1:
            self._emitted = ["".join(self._emitted)]
        return self._emitted[0] if self._emitted else ""

    def push(self, token_id: int) -> str:
        """Take one token; the text that can be shown now, often of earlier tokens, or ``""``."""
        return self._advance(self._decoder.decode(self._pieces[token_id]))

    def flush(self) -> str:
        """No more tokens come: the rest of the text. An unfinished character becomes U+FFFD."""
        text = self._advance(self._decoder.decode(b"", final=True))
        if self.stopped:
            return text
        rest, self._held = self._held, ""
        return text + self._emit(rest)

    def _advance(self, new: str) -> str:
        if self.stopped or not new:
            return ""
        if self._num_spaces_to_drop:
            new = self._without_leading_spaces(new)
        if not self._stop:
            return self._emit(new)
        return self._emit(self._before_stop(self._held + new, len(self._held)))

    def _emit(self, text: str) -> str:
        if text:
            self._emitted.append(text)
        return text

    def _without_leading_spaces(self, new: str) -> str:
        stripped = new.lstrip(" ")
        num_dropped = min(len(new) - len(stripped), self._num_spaces_to_drop)
        self._num_spaces_to_drop = 0 if stripped else self._num_spaces_to_drop - num_dropped
        return new[num_dropped:]

    def _before_stop(self, text: str, num_held: int) -> str:
        """What of ``text`` may be shown; holds the rest back, or stops."""
        matches = []
        for stop in self._stop:
            start = text.find(stop, max(0, num_held - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start))
        if matches:
            self.stopped, self._held = True, ""
            return text[: min(matches)[1]]
        num_safe = min(_start_of_partial(text, stop) for stop in self._stop)
        self._held = text[num_safe:]
        return text[:num_safe]


def _start_of_partial(text: str, stop: str) -> int:
    """Where the longest end of ``text`` begins that is a beginning of ``stop``."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)
