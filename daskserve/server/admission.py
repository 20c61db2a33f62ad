"""How many answers may be at work at once; who comes later is told at once to come again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from daskserve.server.errors import Refusal

_RETRY_AFTER_S = 1.0


class Admission:
    """Counts answers at work in this server.

    Parameters
    ----------
    limit
        Most answers at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_in_flight = 0

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Room for one answer, for as long as the context lasts (Refusal with 429)."""
        place = Place(self)
        place.grow(1)
        try:
            yield place
        finally:
            self.num_in_flight -= place.size


class Place:
    """The room that one HTTP request takes."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.size = 0

    def grow(self, size: int) -> None:
        """Take room for ``size`` answers in all, or refuse and keep what there is."""
        more = size - self.size
        if self._admission.num_in_flight + more > self._admission.limit:
            message = "the server is at its limit of answers in flight; try again later"
            raise Refusal(429, message, code="overloaded", retry_after_s=_RETRY_AFTER_S)
        self._admission.num_in_flight += more
        self.size = size
