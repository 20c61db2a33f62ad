"""What is asked: random tokens of a given length, or lines of a file. The same seed, the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from daskserve.errors import ConfigError

Prompt = str | list[int] | list[dict[str, Any]]

TOKEN_IDS = (100, 250)
"""Every vocabulary has these ids, and they are special in none that we know of."""

_WORDS = (
    "the and for that with this from have they will would there their what about which when make "
    "like time just know take people into year your good some could them other than then now look "
    "only come over think also back after use two how our work first well way even new want any"
).split()


class Prompts(Protocol):
    """Gives the prompt of the request number ``index``, of so many tokens if ``has_lengths``."""

    has_lengths: bool

    def prompt(self, index: int, num_tokens: int) -> Prompt: ...


class RandomTokens:
    """Token ids drawn evenly, so that no two prompts share a prefix; for ``/v1/completions``.

    Parameters
    ----------
    low, high
        Ids are ``low`` to ``high``, both included.
    """

    has_lengths = True

    def __init__(self, seed: int, low: int = TOKEN_IDS[0], high: int = TOKEN_IDS[1]) -> None:
        if not 0 <= low < high:
            raise ConfigError(f"token ids {low}-{high} must be two numbers, the lower one first")
        self._seed, self._low, self._high = seed, low, high

    def prompt(self, index: int, num_tokens: int) -> list[int]:
        generator = np.random.default_rng((self._seed, index))
        ids: list[int] = generator.integers(self._low, self._high + 1, num_tokens).tolist()
        return ids


class RandomWords:
    """A message of short words, each about a token; for ``/v1/chat/completions``."""

    has_lengths = True

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, index: int, num_tokens: int) -> list[dict[str, Any]]:
        generator = np.random.default_rng((self._seed, index))
        words = generator.integers(0, len(_WORDS), num_tokens)
        return [{"role": "user", "content": " ".join(_WORDS[word] for word in words)}]


class FileLines:
    """The lines of a file in turn: plain text, or JSON objects with ``prompt`` or ``messages``.

    Parameters
    ----------
    path
        ``.jsonl`` for objects, anything else is text.
    is_chat
        A text becomes a message of the user, and messages are allowed at all.

    Raises
    ------
    ConfigError
        The file cannot be read, is empty, or a line has no prompt.
    """

    has_lengths = False

    def __init__(self, path: str | Path, is_chat: bool) -> None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read prompts from {path}: {error}") from None
        read = _of_json if str(path).endswith(".jsonl") else _of_text
        self._prompts = [
            read(line, is_chat, f"{path} line {number}")
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
        if not self._prompts:
            raise ConfigError(f"{path} holds no prompt; write one a line")

    def prompt(self, index: int, num_tokens: int) -> Prompt:
        return self._prompts[index % len(self._prompts)]


def _of_text(line: str, is_chat: bool, where: str) -> Prompt:
    return [{"role": "user", "content": line}] if is_chat else line


def _of_json(line: str, is_chat: bool, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    match row:
        case {"prompt": str(text)} if text:
            return _of_text(text, is_chat, where)
        case {"messages": [_, *_] as messages} if is_chat:
            return list(messages)
        case {"messages": _}:
            raise ConfigError(f"{where} has messages: those need --endpoint chat")
    raise ConfigError(f"{where} must be an object with a text as prompt, or with messages")


def token_ids(text: str) -> tuple[int, int]:
    """``100-250`` as two numbers (ConfigError)."""
    low, _, high = text.partition("-")
    try:
        return int(low), int(high)
    except ValueError:
        raise ConfigError(f"--token-ids {text!r} must be two numbers, as in 100-250") from None
