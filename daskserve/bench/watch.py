"""Ends runs that cannot come out well any more: a search for goodput has better rates to try."""

from __future__ import annotations

from collections.abc import Collection

from daskserve.bench.record import Record
from daskserve.core.slo import SLO

INTERVAL_S = 0.1


class Watch:
    """Counts the requests of a run that surely miss an SLO, those at work included.

    Parameters
    ----------
    num_requests
        Of the whole run: when more have missed than it may have at all, it is hopeless.
    """

    def __init__(self, slo: SLO, num_requests: int) -> None:
        self._slo = slo
        self._most_misses = (1 - slo.attainment) * num_requests
        self._num_missed = 0
        self._looked_at = 0.0

    def note(self, record: Record) -> None:
        """A request has ended."""
        self._num_missed += not (record.is_ok and self._slo.is_met(record.ttft_s, record.tpot_s))

    def overdue(self, at_work: Collection[Record], now_s: float) -> list[Record]:
        """Of the requests at work those that miss the SLO whatever comes; time is the run's."""
        return [record for record in at_work if self._is_overdue(record, now_s)]

    def is_hopeless(self, at_work: Collection[Record], now_s: float) -> bool:
        """Whether the run as a whole misses the SLO; looks at what is at work now and then."""
        if self._num_missed <= self._most_misses and now_s - self._looked_at < INTERVAL_S:
            return False
        self._looked_at = now_s
        return self._num_missed + len(self.overdue(at_work, now_s)) > self._most_misses

    def _is_overdue(self, record: Record, now_s: float) -> bool:
        if record.first_s != record.first_s:
            return now_s - record.sent_s > self._slo.ttft_s
        tokens_left_s = self._slo.tpot_s * (record.max_tokens - 1)
        return record.ttft_s > self._slo.ttft_s or now_s - record.first_s > tokens_left_s
