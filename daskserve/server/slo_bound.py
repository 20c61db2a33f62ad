"""How much may be at work so that what is taken in still meets the SLO. Pure: time is given.

Beyond its capacity a server that takes in all it has room for makes everybody late. Two limits
follow from what was seen of late:

- An answer waits for a decode slot as long as those before it take to leave theirs. With L answers
  in flight for S slots and a step of s seconds its TPOT is about s L / S, however long it is; so L
  may be S times TPOT limit / s.
- A prompt waits for those before it, one first token after the other. With one each d seconds,
  K prompts in front make TTFT about K d; so K may be TTFT limit / d.

Means are not all: answers that begin together end together, and then some wait much longer than
others. So each limit has a factor, at most 1, that follows the share of answers that were late
because they waited.
"""

from __future__ import annotations

from daskserve.core.request import Timeline
from daskserve.core.slo import SLO

_FIRST_RATIO, _MOST_RATIO = 1.25, 2.0
_LEAST_FACTOR = 0.4
_KEPT = 0.95
"""Of what was seen before, with each new observation."""
_GAIN = 0.02
_LOADED_FOR = 50
"""So many answers after a refusal say something of the limits; those of a light load do not."""


class SloBound:
    """Observations of late, and what they allow.

    Parameters
    ----------
    slo
        Limits that answers are to meet, and how many of them must.
    num_slots
        Answers that all instances decode at once.
    """

    def __init__(self, slo: SLO, num_slots: int) -> None:
        self._slo, self._num_slots = slo, num_slots
        self._step_s: float | None = None
        self._busy_s = 0.0
        self._num_first_tokens = 0.0
        self._busy_since: float | None = None
        self._num_waiting = 0
        self._in_flight_factor, self._waiting_factor = 0.8, 0.9
        self._loaded_for = 0

    @property
    def max_in_flight(self) -> int:
        """L: prompts and answers together."""
        ratio = self._slo.tpot_s / self._step_s if self._step_s else _FIRST_RATIO
        ratio = min(max(ratio, 1.0), _MOST_RATIO)
        return max(1, int(self._num_slots * ratio * self._in_flight_factor))

    @property
    def max_waiting(self) -> float:
        """K: prompts without their first token; always one, since nothing is learned from none."""
        if not self._busy_s:
            return float("inf")
        per_s = self._num_first_tokens / self._busy_s
        return max(1.0, self._slo.ttft_s * per_s * self._waiting_factor)

    def allows(self, more: int, num_in_flight: int) -> bool:
        """Whether ``more`` answers beside those in flight would meet the SLO."""
        is_short = self._num_waiting + more <= self.max_waiting
        if num_in_flight == 0 or (num_in_flight + more <= self.max_in_flight and is_short):
            return True
        self._loaded_for = _LOADED_FOR
        return False

    def began(self, num_answers: int, now: float) -> None:
        """Answers were taken in."""
        if self._num_waiting == 0:
            self._busy_since = now
        self._num_waiting += num_answers

    def first_token(self, now: float) -> None:
        """One of them has its first token."""
        if self._busy_since is not None:
            self._busy_s = _KEPT * self._busy_s + now - self._busy_since
            self._num_first_tokens = _KEPT * self._num_first_tokens + 1
        self._waits_no_more(1, now)

    def gave_up(self, num_answers: int, now: float) -> None:
        """Some end without a token."""
        self._waits_no_more(num_answers, now)

    def finished(
        self, ttft_s: float, tpot_s: float | None, num_gaps: int, timeline: Timeline
    ) -> None:
        """An answer is complete.

        Parameters
        ----------
        ttft_s, tpot_s
            As its client saw them; None for an answer of one token.
        num_gaps
            Tokens after the first.
        timeline
            Where its time went.
        """
        waited_s = timeline.prefill_queue_s
        self._waiting_factor = self._followed(
            self._waiting_factor, ttft_s, waited_s, self._slo.ttft_s
        )
        if tpot_s is not None:
            step_s = timeline.decode_s / num_gaps
            self._step_s = step_s if self._step_s is None else _mixed(self._step_s, step_s)
            # Up to one step everybody waits, for the one that runs to end.
            waited_s = max(0.0, timeline.decode_queue_s - step_s)
            self._in_flight_factor = self._followed(
                self._in_flight_factor, tpot_s * num_gaps, waited_s, self._slo.tpot_s * num_gaps
            )
        self._loaded_for = max(0, self._loaded_for - 1)

    def _followed(self, factor: float, took_s: float, waited_s: float, limit_s: float) -> float:
        """Rests where a certain share is late."""
        is_met = took_s <= limit_s
        if is_met and not self._loaded_for:
            return factor
        if took_s - waited_s > limit_s:
            return factor  # late without any wait, whatever is taken in
        # Half of those that may be: the other half are for what no bound foresees.
        late = (1.0 - self._slo.attainment) / 2
        factor += _GAIN * (late if is_met else late - 1.0)
        return min(max(factor, _LEAST_FACTOR), 1.0)

    def _waits_no_more(self, num_answers: int, now: float) -> None:
        self._num_waiting -= num_answers
        self._busy_since = now if self._num_waiting else None


def _mixed(before: float, now: float) -> float:
    return _KEPT * before + (1 - _KEPT) * now
