"""What became of one row: the record that the journal keeps and the summary adds up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daskserve.core.request import Completion, Timeline

MAX_MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished row.

    ``error_code`` and ``message`` are set for a row that failed; ``custom_id`` only then, since
    a journal of a million rows should not repeat what the output holds.
    """

    row: int
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    timeline: Timeline = Timeline()
    custom_id: str = ""
    error_code: str = ""
    message: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error_code)

    @classmethod
    def of(cls, row: int, completion: Completion) -> Outcome:
        """With the times as the journal keeps them: what is counted now, and again from there,
        is the same."""
        found = cls(
            row, completion.num_prompt_tokens, completion.num_output_tokens, completion.timeline
        )
        return cls.from_record(found.to_record())

    @classmethod
    def failure(cls, row: int, custom_id: str, code: str, message: str) -> Outcome:
        """The message is cut to what people read, and made text that JSON can hold."""
        cut = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
        text = cut.encode(errors="backslashreplace").decode()
        return cls(row, custom_id=custom_id, error_code=code, message=text)

    def to_record(self) -> list[Any]:
        """JSON values for the journal, the row number first."""
        if self.failed:
            return [self.row, self.custom_id, self.error_code, self.message]
        t = self.timeline
        stages = (t.prefill_queue_s, t.prefill_s, t.kv_transfer_s, t.decode_queue_s, t.decode_s)
        rounded = [round(stage_s, 6) for stage_s in stages]
        return [
            self.row, self.num_prompt_tokens, self.num_output_tokens, *rounded, t.num_recomputes,
        ]  # fmt: skip

    @classmethod
    def from_record(cls, record: list[Any]) -> Outcome:
        """Inverse of `to_record`; ValueError when it is not such a record."""
        match record:
            case [int(row), str(custom_id), str(code), str(message)] if code:
                return cls.failure(row, custom_id, code, message)
            case [int(row), int(num_prompt), int(num_output), *stages, int(num_recomputes)] if len(
                stages
            ) == 5 and all(isinstance(s, float | int) for s in stages):
                timeline = Timeline(*map(float, stages), num_recomputes=num_recomputes)
                return cls(row, num_prompt, num_output, timeline)
        raise ValueError(f"not a journal record: {record!r}")
