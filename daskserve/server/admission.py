"""How many answers may be at work at once; who comes later is told at once to come again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from daskserve.server.errors import Refusal

_RETRY_AFTER_S = 1.0
_LOADING_RETRY_S = 5.0


class Admission:
    """Counts answers at work in this server.

    Parameters
    ----------
    limit_per_key
        Most answers at once for one API key, so that others find room; None: no such limit.
    """

    def __init__(self, limit_per_key: int | None = None) -> None:
        self._limit = 0
        self._limit_per_key = limit_per_key
        self._by_key: Counter[int | None] = Counter()
        self.num_in_flight = 0

    @property
    def is_open(self) -> bool:
        """Whether anybody is let in at all."""
        return self._limit > 0

    def open(self, limit: int) -> None:
        """Let so many answers be at work from now on; 0 closes."""
        self._limit = limit

    @contextmanager
    def place(self, key: int | None) -> Iterator[Place]:
        """Room for one answer, for as long as the context lasts (Refusal with 429)."""
        place = Place(self, key)
        place.grow(1)
        try:
            yield place
        finally:
            self.take(-place.size, key)

    def check(self, more: int, key: int | None) -> None:
        """Refuse what does not fit (Refusal with 429, or 503)."""
        if not self.is_open:
            message = "the model is not loaded, or the server stops"
            raise Refusal(503, message, code="not_ready", retry_after_s=_LOADING_RETRY_S)
        if self.num_in_flight + more > self._limit:
            raise _refusal("the server is at its limit of answers in flight; try again later")
        most = self._limit_per_key
        if most is not None and self._by_key[key] + more > most:
            raise _refusal(f"this key has its {most} answers in flight; wait for one of them")

    def take(self, size: int, key: int | None) -> None:
        """Count ``size`` answers more, or fewer."""
        self.num_in_flight += size
        self._by_key[key] += size


class Place:
    """The room that one HTTP request takes."""

    def __init__(self, admission: Admission, key: int | None) -> None:
        self._admission, self._key = admission, key
        self.size = 0

    def grow(self, size: int) -> None:
        """Take room for ``size`` answers in all, or refuse and keep what there is."""
        more = size - self.size
        self._admission.check(more, self._key)
        self._admission.take(more, self._key)
        self.size = size


def _refusal(message: str) -> Refusal:
    return Refusal(429, message, code="overloaded", retry_after_s=_RETRY_AFTER_S)
