"""How much may be at work so that what is taken in still meets the SLO. Pure: time is given.

Beyond its capacity a server that takes in all it has room for makes everybody late. Two limits
follow from what was seen of late:

- An answer waits for a decode slot as long as those before it take to leave theirs. With L answers
  in flight for S slots and a step of s seconds its TPOT is about s L / S, however long it is; so L
  may be S times TPOT limit / s.
- A prompt waits for those before it, one first token after the other. With one each d seconds,
  K prompts in front make TTFT about K d; so K may be TTFT limit / d.
"""

from __future__ import annotations

from daskserve.core.slo import SLO

_TPOT_SHARE = 0.9
_TTFT_SHARE = 0.8
"""Of the limits: what is left is for the network, and for answers that are not average."""
_FIRST_RATIO, _MOST_RATIO = 1.25, 2.0
_KEPT = 0.95
"""Of what was seen before, with each new observation."""


class SloBound:
    """Observations of late, and what they allow.

    Parameters
    ----------
    slo
        Limits that answers are to meet.
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

    @property
    def max_in_flight(self) -> int:
        """L: prompts and answers together."""
        ratio = self._slo.tpot_s / self._step_s if self._step_s else _FIRST_RATIO
        ratio = min(max(ratio, 1.0), _MOST_RATIO)
        return max(1, int(self._num_slots * ratio * _TPOT_SHARE))

    @property
    def max_waiting(self) -> float:
        """K: prompts without their first token; always one, since nothing is learned from none."""
        if not self._busy_s:
            return float("inf")
        return max(1.0, _TTFT_SHARE * self._slo.ttft_s * self._num_first_tokens / self._busy_s)

    def allows(self, more: int, num_in_flight: int) -> bool:
        """Whether ``more`` answers beside those in flight would meet the SLO."""
        is_short = self._num_waiting + more <= self.max_waiting
        return num_in_flight == 0 or (num_in_flight + more <= self.max_in_flight and is_short)

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

    def decoded(self, decode_s: float, num_gaps: int) -> None:
        """An answer took so long for its tokens after the first, waiting left out."""
        if num_gaps:
            step_s = decode_s / num_gaps
            self._step_s = step_s if self._step_s is None else _mixed(self._step_s, step_s)

    def _waits_no_more(self, num_answers: int, now: float) -> None:
        self._num_waiting -= num_answers
        self._busy_since = now if self._num_waiting else None


def _mixed(before: float, now: float) -> float:
    return _KEPT * before + (1 - _KEPT) * now
