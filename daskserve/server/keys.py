"""API keys: where they come from, and how one that is shown is compared."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from daskserve.errors import ConfigError

KEYS_VARIABLE = "DASKSERVE_API_KEYS"
_MIN_CHARS = 16


class KeyRing:
    """Keys of which any one opens the server, so that they can be rotated; none: it is open.

    Parameters
    ----------
    keys
        Printable ASCII, at least 16 characters each (ConfigError).
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = tuple(dict.fromkeys(keys))
        for number, key in enumerate(self._keys, start=1):
            # The message must not hold the key.
            if len(key) < _MIN_CHARS or not (key.isascii() and key.isprintable()) or " " in key:
                raise ConfigError(
                    f"API key {number} must be at least {_MIN_CHARS} printable ASCII characters "
                    "without spaces"
                )

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._keys)}>"

    def number_of(self, shown: str) -> int | None:
        """Which key this is, None if it is none of them; takes the same time for all."""
        found = None
        for number, key in enumerate(self._keys):
            if hmac.compare_digest(shown.encode(), key.encode()):
                found = number
        return found


def load_keys(path: str | None) -> KeyRing:
    """Keys from a file (one a line, # begins a comment) and ``DASKSERVE_API_KEYS`` (by commas).

    Raises
    ------
    ConfigError
        The file cannot be read, holds no key, or a key is too short.
    """
    keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read keys from {path}: {error}") from None
        in_file = [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]
        if not in_file:
            raise ConfigError(f"{path} holds no key; write one a line")
        keys += in_file
    return KeyRing(keys)
