"""Checks of what callers send as prompt or conversation; errors name the field, not the text."""

from __future__ import annotations

from typing import Any

from daskserve.errors import InvalidParameter

ROLES = ("system", "user", "assistant")
_SAME_AS = {"developer": "system"}
MAX_MESSAGES = 10_000


def checked_text(field: str, text: object) -> str:
    """``text`` if it is a string that can be written as UTF-8, else InvalidParameter."""
    if not isinstance(text, str):
        raise InvalidParameter(field, _kind(text), "must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            field,
            f"string of {len(text)} characters",
            f"must not contain lone surrogates (character {error.start})",
        ) from None
    return text


def checked_messages(messages: object) -> list[dict[str, str]]:
    """Role and content of each message, content as one string; InvalidParameter names the fault."""
    if not isinstance(messages, list | tuple):
        raise InvalidParameter("messages", _kind(messages), "must be a list of messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidParameter(
            "messages", f"list of {len(messages)}", f"must hold 1..{MAX_MESSAGES} messages"
        )
    return [_checked_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _checked_message(field: str, message: object) -> dict[str, str]:
    if not isinstance(message, dict):
        raise InvalidParameter(field, _kind(message), "must be an object with role and content")
    role = message.get("role")
    if isinstance(role, str):
        role = _SAME_AS.get(role, role)
    if role not in ROLES:
        allowed = ", ".join([*ROLES, *_SAME_AS])
        raise InvalidParameter(f"{field}.role", message.get("role"), f"must be one of {allowed}")
    return {"role": role, "content": _checked_content(f"{field}.content", message.get("content"))}


def _checked_content(field: str, content: Any) -> str:
    if not isinstance(content, list):
        return checked_text(field, content)
    texts = []
    for index, part in enumerate(content):
        part_field = f"{field}[{index}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise InvalidParameter(part_field, kind, 'must be {"type": "text", "text": ...}')
        texts.append(checked_text(f"{part_field}.text", part.get("text")))
    return "\n".join(texts)


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
