"""What was seen of one request, and the kinds of failure that are counted."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

OK = "ok"
PENDING = "unfinished"
"""Still at work when the run was stopped."""
GIVEN_UP = "given up"
"""Ended by this side after the run because it had missed the SLO already."""
STAGES = ("prefill_queue_s", "prefill_s", "kv_transfer_s", "decode_queue_s", "decode_s")
"""What our server tells of a request, as `daskserve.core.request.Timeline` has it."""


@dataclass(slots=True)
class Record:
    """Times are seconds of the run, from its start.

    Parameters
    ----------
    index
        Number of the request.
    arrival_s
        When it was to be sent.
    prompt_tokens, output_tokens
        What the server counted; until then what was asked for (a prompt's length may be unknown,
        0).
    sent_s, first_s, last_s
        When it was sent, and when its first and last token came; NaN if that did not happen.
    status
        ``ok``, or a kind of failure with no more in it than a code.
    message
        What the server or the system said of the failure.
    gaps_s
        Between tokens: every chunk after the first one.
    """

    index: int
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    output_tokens: int = 0
    sent_s: float = math.nan
    first_s: float = math.nan
    last_s: float = math.nan
    end_s: float = math.nan
    status: str = PENDING
    message: str = ""
    gaps_s: array[float] = field(default_factory=lambda: array("f"))
    stages_s: tuple[float, ...] | None = None

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def ttft_s(self) -> float:
        """From sending to the first token; NaN without one."""
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)
