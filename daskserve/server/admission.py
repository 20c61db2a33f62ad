"""How many answers may be at work at once; who comes later is told at once to come again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from daskserve.core.request import Completion
from daskserve.server.errors import Refusal
from daskserve.server.slo_bound import SloBound

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
        self.slo_bound: SloBound | None = None

    @property
    def is_open(self) -> bool:
        """Whether anybody is let in at all."""
        return self._limit > 0

    def open(self, limit: int, slo_bound: SloBound | None = None) -> None:
        """Let so many answers be at work from now on, or fewer by the SLO; 0 closes."""
        self._limit, self.slo_bound = limit, slo_bound

    @contextmanager
    def place(self, key: int | None) -> Iterator[Place]:
        """Room for one answer, for as long as the context lasts (Refusal with 429)."""
        place = Place(self, key)
        place.grow(1)
        try:
            yield place
        finally:
            place.leave()

    def take(self, size: int, key: int | None) -> None:
        """Count ``size`` answers more, or refuse them (Refusal with 429, or 503)."""
        if not self.is_open:
            message = "the model is not loaded, or the server stops"
            raise Refusal(503, message, code="not_ready", retry_after_s=_LOADING_RETRY_S)
        bound = self.slo_bound
        is_slow = bound is not None and not bound.allows(size, self.num_in_flight)
        if is_slow or self.num_in_flight + size > self._limit:
            raise _refusal("the server is at its limit of answers in flight; try again later")
        most = self._limit_per_key
        if most is not None and self._by_key[key] + size > most:
            raise _refusal(f"this key has its {most} answers in flight; wait for one of them")
        self.give_back(-size, key)

    def give_back(self, size: int, key: int | None) -> None:
        """``size`` answers are over."""
        self.num_in_flight -= size
        self._by_key[key] -= size
        if not self._by_key[key]:
            del self._by_key[key]


class Place:
    """The room that one HTTP request takes."""

    def __init__(self, admission: Admission, key: int | None) -> None:
        self._admission, self._key = admission, key
        self._bound = admission.slo_bound
        self._size = self._num_waiting = 0

    def grow(self, size: int) -> None:
        """Take room for ``size`` answers in all, or refuse and keep what there is."""
        more = size - self._size
        if more:
            self._admission.take(more, self._key)
            self._size = size
            self._num_waiting += more
            if self._bound is not None:
                self._bound.began(more, time.monotonic())

    def first_token(self) -> None:
        """One of the answers has its first token."""
        self._num_waiting -= 1
        if self._bound is not None:
            self._bound.first_token(time.monotonic())

    def finished(self, ttft_s: float, tpot_s: float | None, completion: Completion) -> None:
        """One of the answers is complete."""
        if self._bound is not None:
            num_gaps = completion.num_output_tokens - 1
            self._bound.finished(ttft_s, tpot_s, num_gaps, completion.timeline)

    def leave(self) -> None:
        self._admission.give_back(self._size, self._key)
        if self._bound is not None and self._num_waiting:
            self._bound.gave_up(self._num_waiting, time.monotonic())


def _refusal(message: str) -> Refusal:
    return Refusal(429, message, code="overloaded", retry_after_s=_RETRY_AFTER_S)
