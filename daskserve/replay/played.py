"""What came of a day that was played, against the simulator or the real service."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from daskserve.core.slo import SLO
from daskserve.observe import Sample
from daskserve.observe.observation import Observation, Recorder
from daskserve.replanning.decision import Decision


@dataclass(eq=False)
class Played:
    """Requests in order of arrival.

    Parameters
    ----------
    name
        Of the way it was played, such as ``replanning`` or ``3P3D``.
    arrival_s, met, failed
        When each request came, whether it met both limits, and whether it failed.
    first_token_s
        When its first token was there; NaN without one.
    """

    name: str
    arrival_s: np.ndarray
    met: np.ndarray
    failed: np.ndarray
    first_token_s: np.ndarray
    decisions: list[Decision] = field(default_factory=list)
    began_unix_s: float = 0.0
    """Clock of the decisions at the start of the day; 0 in the simulator."""

    @property
    def span_s(self) -> float:
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self.arrival_s) > 1 else 0.0

    def goodput_rps(self, from_s: float = 0.0, to_s: float = float("inf")) -> float:
        """Requests per second that arrived in between and met both limits."""
        inside = (self.arrival_s >= from_s) & (self.arrival_s < to_s)
        if not inside.any():
            return 0.0
        end_s = min(to_s, float(self.arrival_s[-1]))
        seconds = end_s - max(from_s, float(self.arrival_s[0]))
        return float(self.met[inside].sum()) / seconds if seconds > 0 else 0.0

    @property
    def attainment(self) -> float | None:
        return float(self.met.mean()) if len(self.met) else None

    @property
    def num_failed(self) -> int:
        return int(self.failed.sum())

    @property
    def changes(self) -> list[Decision]:
        """The decisions that changed something."""
        return [d for d in self.decisions if d.is_change and not d.is_dry_run]

    def over_time(self, window_s: float) -> list[tuple[float, int, float]]:
        """``(start, requests, attainment)`` of every window that has requests."""
        window = (self.arrival_s // window_s).astype(np.int64)
        numbers, starts = np.unique(window, return_index=True)
        parts = np.split(self.met, starts[1:])
        return [
            (float(number * window_s), len(met), float(met.mean()))
            for number, met in zip(numbers, parts, strict=True)
            if len(met)
        ]

    def record(self, recorder: Recorder, slo: SLO, window_s: float) -> None:
        """Write one row per window, with the decisions that fell into it."""
        told = 0
        for start_s, count, attainment in self.over_time(window_s):
            end_s = start_s + window_s
            new = [d for d in self.decisions[told:] if d.at_unix_s - self.began_unix_s < end_s]
            told += len(new)
            sample = Sample(
                at=self.began_unix_s + end_s,
                window_s=window_s,
                slo=slo,
                arrived_per_s=count / window_s,
                finished_per_s=count / window_s,
                attainment=attainment,
            )
            recorder.add(Observation(sample, decisions=tuple(d.to_json() for d in new)))


def table(days: list[Played], window_s: float) -> list[str]:
    """Attainment over time, a column per way of playing."""
    header = f"{'from s':>8} {'req/s':>6} " + " ".join(f"{day.name:>12}" for day in days)
    lines = [header]
    columns = [{row[0]: row for row in day.over_time(window_s)} for day in days]
    for start_s in sorted(columns[0]):
        rate = columns[0][start_s][1] / window_s
        shares = [column[start_s][2] if start_s in column else float("nan") for column in columns]
        cells = " ".join(f"{share:>12.1%}" for share in shares)
        lines.append(f"{start_s:>8.0f} {rate:>6.2f} {cells}")
    totals = " ".join(f"{day.goodput_rps():>12.2f}" for day in days)
    lines.append(f"{'within both limits, req/s':>15} {totals}")
    return lines


def decision_lines(day: Played) -> list[str]:
    """Each decision on a line, with what came of it."""
    lines = []
    for one in day.decisions:
        line = f"{one.at_unix_s - day.began_unix_s:>8.0f} s  {one.trigger.value}: {one.reason}"
        if one.outcome is not None:
            line += f" [{one.outcome.status.value} in {one.outcome.took_s:.1f} s"
            if one.outcome.pause_s:
                line += f", pause {one.outcome.pause_s:.2f} s"
            line += f": {one.outcome.error}]" if one.outcome.error else "]"
        lines.append(line)
    return lines
