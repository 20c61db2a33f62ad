"""One finished request as it is counted: when, how long each stage took, how many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daskserve.core.request import Completion, Timeline

_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Finished:
    """A complete answer.

    Parameters
    ----------
    finished_at
        Seconds on the scheduler's monotonic clock.
    """

    finished_at: float
    prompt_tokens: int
    output_tokens: int
    timeline: Timeline

    @classmethod
    def of(cls, completion: Completion, finished_at: float) -> Finished:
        return cls(
            finished_at,
            completion.num_prompt_tokens,
            completion.num_output_tokens,
            completion.timeline,
        )

    @property
    def arrived_at(self) -> float:
        return self.finished_at - self.timeline.total_s

    @property
    def ttft_s(self) -> float:
        return self.timeline.ttft_s

    @property
    def tpot_s(self) -> float | None:
        """None for a single token."""
        return self.timeline.tpot_s(self.output_tokens)

    def to_record(self) -> list[Any]:
        """JSON values, short: there may be hundreds a second."""
        t = self.timeline
        stages = (t.prefill_queue_s, t.prefill_s, t.kv_transfer_s, t.decode_queue_s, t.decode_s)
        return [
            round(self.finished_at, _DIGITS),
            self.prompt_tokens,
            self.output_tokens,
            *(round(stage_s, _DIGITS) for stage_s in stages),
            t.num_recomputes,
        ]

    @classmethod
    def from_record(cls, record: list[Any] | tuple[Any, ...]) -> Finished:
        """Inverse of `to_record`."""
        finished_at, prompt, output, *timeline = record
        return cls(finished_at, prompt, output, Timeline(*timeline))
