"""Log-probabilities in the shapes of the two endpoints."""

from __future__ import annotations

import math
from typing import Any

from daskserve.core.request import TokenDelta, TokenLogprob
from daskserve.text import Detokenizer, Tokenizer

_LEAST = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot hold."""


class LogprobWriter:
    """Log-probabilities of one answer, chunk by chunk.

    Parameters
    ----------
    tokenizer
        Names the tokens.
    is_chat
        Chat completions have a list of objects, completions parallel lists.
    text_offset
        Characters of the answer's text before the first token, completions only.
    """

    def __init__(self, tokenizer: Tokenizer, is_chat: bool, text_offset: int = 0) -> None:
        self._tokenizer, self._is_chat = tokenizer, is_chat
        self._text_offset = text_offset
        self._detokenizer = Detokenizer(tokenizer)

    def write(self, delta: TokenDelta) -> dict[str, Any]:
        """Those of one delta's tokens."""
        pairs = list(zip(delta.token_ids, delta.logprobs or (), strict=True))
        if self._is_chat:
            return {"content": [self._chat_entry(*pair) for pair in pairs], "refusal": None}
        columns: dict[str, Any] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        for token_id, found in pairs:
            columns["tokens"].append(self._name(token_id))
            columns["token_logprobs"].append(_finite(found.logprob))
            columns["top_logprobs"].append(self._top_by_name(token_id, found))
            columns["text_offset"].append(self._text_offset)
            self._text_offset += len(self._detokenizer.push(token_id))
        return columns

    def _chat_entry(self, token_id: int, found: TokenLogprob) -> dict[str, Any]:
        top = [self._entry(*pair) for pair in found.top]
        return self._entry(token_id, found.logprob) | {"top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        # A special token has no bytes: those of all tokens joined are the text.
        piece = self._tokenizer.pieces[token_id]
        name = self._name(token_id)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(piece) or None}

    def _top_by_name(self, token_id: int, found: TokenLogprob) -> dict[str, float]:
        # The sampled token always, as OpenAI has it: up to one more than asked for.
        top = {self._name(other): _finite(logprob) for other, logprob in found.top}
        return top | {self._name(token_id): _finite(found.logprob)}

    def _name(self, token_id: int) -> str:
        """The token's text; one that is no whole character by its bytes, as OpenAI writes it."""
        piece = self._tokenizer.pieces[token_id]
        if not piece:
            return self._tokenizer.token_text(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def joined(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Those of a whole answer; None when they were not asked for."""
    if not parts:
        return None
    first = parts[0]
    if "content" in first:
        content = [entry for part in parts for entry in part["content"]]
        return {"content": content, "refusal": None}
    return {name: [value for part in parts for value in part[name]] for name in first}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
