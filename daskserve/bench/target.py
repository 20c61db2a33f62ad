"""The server under load: where it is, how it is asked, and what it says of itself."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from daskserve.bench.prompts import Prompt
from daskserve.errors import ConfigError

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what is the same in all of them.

    Parameters
    ----------
    url
        ``http://host:port``, with or without ``/v1``.
    model
        As the server calls it.
    endpoint
        ``completions`` or ``chat``.
    key
        Shown as a bearer token; empty shows none.
    ca_file
        PEM of an authority of your own, for https.
    has_timelines
        Whether the server tells the stages of a request when asked (ours does).
    extra
        Further fields of every body.
    """

    url: str
    model: str
    endpoint: str = "completions"
    key: str = field(default="", repr=False)
    ca_file: str | None = None
    has_timelines: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url {self.url!r}: {error}") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"--url {self.url!r} must begin with http:// or https://")
        if not (self.key.isascii() and self.key.isprintable()):
            raise ConfigError("the API key must be printable ASCII")
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    def body(self, prompt: Prompt, max_tokens: int) -> bytes:
        """The request's JSON."""
        options = {"include_usage": True}
        if self.has_timelines:
            options["include_timeline"] = True
        return orjson.dumps(
            {
                "model": self.model,
                "messages" if self.endpoint == "chat" else "prompt": prompt,
                "max_tokens": max_tokens,
                "stream": True,
                "stream_options": options,
                **self.extra,
            }
        )

    def client(self, verify: ssl.SSLContext) -> httpx.AsyncClient:
        """One connection, kept between requests for less long than servers keep theirs."""
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        return httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            verify=verify,
            timeout=None,
            limits=httpx.Limits(max_connections=1, keepalive_expiry=3.0),
            trust_env=False,  # a proxy would be measured along with the server
        )

    def verify(self) -> ssl.SSLContext:
        """Made once and shared: reading certificates takes longer than a request (ConfigError)."""
        if self.url.startswith("http://"):
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"cannot read certificates from {self.ca_file}: {error}") from None


def load_key(path: str | None) -> str:
    """The first line of a file that is no comment, else ``OPENAI_API_KEY``, else none.

    Raises
    ------
    ConfigError
        The file cannot be read or holds no key.
    """
    if path is None:
        return os.environ.get(KEY_VARIABLE, "").strip()
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read a key from {path}: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path} holds no key")
    return keys[0]
