"""What a batch job came to: counts, speed, latencies against the SLO, and where the time went."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, fields
from typing import Any

from daskserve.batch.outcome import Outcome
from daskserve.batch.stats import LatencyHistogram
from daskserve.core.slo import SLO
from daskserve.observe.jobs import MAX_FAILED_ROWS

STAGES = ("prefill_queue_s", "prefill_s", "kv_transfer_s", "decode_queue_s", "decode_s")
SHARES = (0.5, 0.9, 0.99)
MAX_REASONS = 3


class Tally:
    """Adds up outcomes; rows of earlier runs count in all but the rates."""

    def __init__(self, slo: SLO | None) -> None:
        self.slo = slo
        self.num_succeeded = self.num_failed = self.num_earlier = 0
        self.prompt_tokens = self.output_tokens = 0
        self.run_output_tokens = self.run_attained = 0
        self.num_attained = self.num_recomputes = 0
        self.ttft, self.tpot = LatencyHistogram(), LatencyHistogram()
        self.stage_sums_s = dict.fromkeys(STAGES, 0.0)
        self.failures: list[str] = []
        self.latest_failures: deque[Outcome] = deque(maxlen=MAX_FAILED_ROWS)

    @property
    def num_rows(self) -> int:
        return self.num_succeeded + self.num_failed

    def add_earlier(self, outcome: Outcome) -> None:
        """A row that an earlier run of the job wrote."""
        self.num_earlier += 1
        self._add(outcome)

    def add(self, outcome: Outcome) -> None:
        """A row that this run wrote."""
        self.run_output_tokens += outcome.num_output_tokens
        self.run_attained += self._add(outcome)

    def _add(self, outcome: Outcome) -> bool:
        """True when the row succeeded within the SLO."""
        if outcome.failed:
            self.num_failed += 1
            self.latest_failures.append(outcome)
            if len(self.failures) < MAX_REASONS:
                self.failures.append(f"{outcome.custom_id}: {outcome.message}")
            return False
        self.num_succeeded += 1
        self.prompt_tokens += outcome.num_prompt_tokens
        self.output_tokens += outcome.num_output_tokens
        timeline = outcome.timeline
        self.num_recomputes += timeline.num_recomputes
        for stage in STAGES:
            self.stage_sums_s[stage] += getattr(timeline, stage)
        ttft_s, tpot_s = timeline.ttft_s, timeline.tpot_s(outcome.num_output_tokens)
        self.ttft.add(ttft_s)
        if tpot_s is not None:
            self.tpot.add(tpot_s)
        attained = self.slo is not None and self.slo.is_met(ttft_s, tpot_s)
        self.num_attained += attained
        return attained

    def summary(self, elapsed_s: float, num_retries: int, num_duplicates: int) -> BatchSummary:
        """The closing figures of a run that took ``elapsed_s``."""
        answered = max(1, self.num_succeeded)
        has_slo = self.slo is not None and self.num_succeeded > 0
        return BatchSummary(
            num_rows=self.num_rows,
            num_succeeded=self.num_succeeded,
            num_failed=self.num_failed,
            num_earlier=self.num_earlier,
            num_retries=num_retries,
            num_duplicates=num_duplicates,
            num_recomputes=self.num_recomputes,
            failures=tuple(self.failures),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            elapsed_s=elapsed_s,
            output_tokens_per_s=self.run_output_tokens / elapsed_s if elapsed_s > 0 else 0.0,
            ttft_s=_percentiles(self.ttft),
            tpot_s=_percentiles(self.tpot),
            stages_s={stage: total_s / answered for stage, total_s in self.stage_sums_s.items()},
            slo_ttft_s=self.slo.ttft_s if self.slo else None,
            slo_tpot_s=self.slo.tpot_s if self.slo else None,
            attainment=self.num_attained / self.num_succeeded if has_slo else None,
            goodput_rows_per_s=self.run_attained / elapsed_s if has_slo and elapsed_s else None,
        )


def _percentiles(histogram: LatencyHistogram) -> dict[str, float | None]:
    return {f"p{round(share * 100)}": histogram.percentile(share) for share in SHARES}


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """The closing figures of a job.

    Counts, latencies and attainment are those of the whole job, earlier runs included; rates
    (``output_tokens_per_s``, ``goodput_rows_per_s``) are those of this run. TTFT counts from the
    moment a row was submitted, so it holds its wait among the rows in flight. Percentiles are
    within 0.5 %. ``stages_s`` holds means over the answered rows.
    """

    num_rows: int
    num_succeeded: int
    num_failed: int
    num_earlier: int
    num_retries: int
    num_duplicates: int
    num_recomputes: int
    failures: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int
    elapsed_s: float
    output_tokens_per_s: float
    ttft_s: dict[str, float | None]
    tpot_s: dict[str, float | None]
    stages_s: dict[str, float]
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    attainment: float | None = None
    goodput_rows_per_s: float | None = None

    @property
    def exit_code(self) -> int:
        """0 when all rows were answered, 3 when some failed."""
        return 3 if self.num_failed else 0

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> BatchSummary | None:
        """Inverse of `to_record`; None when fields are missing, as in another version's."""
        try:
            given = {f.name: record[f.name] for f in fields(cls)}
        except KeyError:
            return None
        return cls(**{**given, "failures": tuple(given["failures"])})

    def __str__(self) -> str:
        lines = [self._counts(), self._speed(), f"TTFT {_shown(self.ttft_s)}"]
        lines.append(f"TPOT {_shown(self.tpot_s)}")
        if self.num_succeeded:
            lines.append(self._stages())
        if self.slo_ttft_s is not None:
            lines.append(self._attained())
        lines += [f"failed: {reason}" for reason in self.failures]
        if self.num_failed > len(self.failures):
            lines.append(f"... and {self.num_failed - len(self.failures)} more failed rows")
        return "\n".join(lines)

    def _counts(self) -> str:
        text = f"{self.num_rows} rows: {self.num_succeeded} answered, {self.num_failed} failed"
        notes = {
            "from earlier runs": self.num_earlier,
            "retries": self.num_retries,
            "late duplicates dropped": self.num_duplicates,
            "prompts computed again": self.num_recomputes,
        }
        shown = ", ".join(f"{count} {what}" for what, count in notes.items() if count)
        return f"{text} ({shown})" if shown else text

    def _speed(self) -> str:
        return (
            f"{self.prompt_tokens} prompt and {self.output_tokens} output tokens; "
            f"{self.output_tokens_per_s:.1f} output tokens/s in {self.elapsed_s:.1f} s"
        )

    def _stages(self) -> str:
        total_s = sum(self.stages_s.values()) or 1.0
        parts = (
            f"{stage.removesuffix('_s').replace('_', ' ')} {seconds_text(mean_s)} "
            f"({mean_s / total_s:.0%})"
            for stage, mean_s in self.stages_s.items()
        )
        return f"mean time of a row: {', '.join(parts)}"

    def _attained(self) -> str:
        limits = f"TTFT {seconds_text(self.slo_ttft_s)}, TPOT {seconds_text(self.slo_tpot_s)}"
        if self.attainment is None:
            return f"SLO ({limits}): no answered row"
        return (
            f"SLO ({limits}): {self.attainment:.1%} of the answered rows met it; "
            f"goodput {self.goodput_rows_per_s or 0:.2f} rows/s"
        )


def _shown(percentiles: dict[str, float | None]) -> str:
    return "  ".join(f"{name} {seconds_text(value)}" for name, value in percentiles.items())


def seconds_text(value_s: float | None) -> str:
    """A duration for people."""
    if value_s is None:
        return "-"
    return f"{value_s * 1000:.1f} ms" if value_s < 1 else f"{value_s:.2f} s"
