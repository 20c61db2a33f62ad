"""The model's chat template, rendered so that what people write stays text.

The template comes with the model, never with a request, and runs in Jinja's sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from daskserve.errors import InvalidParameter, ModelError
from daskserve.models.config import read_json

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
_PRIVATE_USE = range(0xF0000, 0xFFFFE)

Message = dict[str, str]


class ChatTemplate:
    """A model's template; ``render`` gives pieces that say which of them may hold special tokens.

    Parameters
    ----------
    source
        Jinja text, or None for a model without one: then ``render`` refuses.
    named_tokens
        The texts that templates know as ``bos_token`` and so on.
    special_tokens
        Texts that become special tokens when the template writes them.
    """

    def __init__(
        self, source: str | None, named_tokens: dict[str, str], special_tokens: Iterable[str]
    ) -> None:
        self._source = source
        self._named_tokens = named_tokens
        longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._first_chars = {token[0] for token in longest_first}

    @classmethod
    def load(cls, model_dir: Path, special_tokens: Iterable[str]) -> ChatTemplate:
        """From ``chat_template.jinja``, else from ``tokenizer_config.json``."""
        config = read_json(model_dir / "tokenizer_config.json", missing_is_empty=True)
        path = model_dir / "chat_template.jinja"
        try:
            source = path.read_text(encoding="utf-8") if path.is_file() else _default_of(config)
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        named = {name: _text_of(config[name]) for name in _NAMED_TOKENS if config.get(name)}
        return cls(source, named, special_tokens)

    def render(self, messages: list[Message]) -> list[tuple[str, bool]]:
        """Pieces of text in order, each with whether special tokens in it are meant.

        Almost always this is one piece, exactly what transformers' ``apply_chat_template``
        tokenizes. Only when something in the messages would turn into a special token is the
        text cut at the template's own ones, and all between them is marked as plain.
        """
        rendered = self._run(messages)
        contents = "".join(message["content"] for message in messages)
        risky = [char for char in self._first_chars if char in contents]
        if not risky:
            return [(rendered, True)]
        unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in rendered)
        stand_ins = {ord(char): next(unused) for char in risky}
        guarded = self._run(
            [message | {"content": message["content"].translate(stand_ins)} for message in messages]
        )
        if self._special_places(guarded) == self._special_places(rendered):
            return [(rendered, True)]
        return self._cut(guarded, {ord(new): chr(old) for old, new in stand_ins.items()})

    def _special_places(self, text: str) -> list[tuple[int, str]]:
        return [(match.start(), match.group()) for match in self._special.finditer(text)]

    def _cut(self, guarded: str, originals: dict[int, str]) -> list[tuple[str, bool]]:
        pieces, end = [], 0
        for match in self._special.finditer(guarded):
            pieces.append((guarded[end : match.start()].translate(originals), False))
            pieces.append((match.group(), True))
            end = match.end()
        pieces.append((guarded[end:].translate(originals), False))
        return [piece for piece in pieces if piece[0]]

    def _run(self, messages: list[Message]) -> str:
        shown = f"list of {len(messages)}"
        if self._source is None:
            raise InvalidParameter(
                "messages", shown, "cannot be used: the model has no chat template; send a prompt"
            )
        try:
            return self._compiled.render(
                messages=messages, add_generation_prompt=True, **self._named_tokens
            )
        except Exception as error:  # a template may fail in any way; the request is what fails
            reason = str(error)[:200]
            raise InvalidParameter(
                "messages", shown, f"do not fit the model's chat template: {reason}"
            ) from error

    @cached_property
    def _compiled(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self._source or "")


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's part for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _default_of(config: dict[str, Any]) -> str | None:
    """Older models keep one template, or several with names, in ``tokenizer_config.json``."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _text_of(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token.get("content", ""))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
