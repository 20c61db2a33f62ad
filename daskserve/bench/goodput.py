"""Finds the goodput of what is running: run after run, each judged before the next is chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from daskserve.bench.offered import Offered
from daskserve.bench.record import Record
from daskserve.bench.results import Results
from daskserve.bench.run import Lag, OpenLoop
from daskserve.bench.search import MIN_REQUESTS, RateSearch, judged, seconds_needed
from daskserve.bench.watch import Watch
from daskserve.core.slo import SLO
from daskserve.planner.stationarity import Probe

_SETTLE_S = 2.0
"""After requests were given up: so long a server may take to free what they held."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One run at one rate and what it showed."""

    rate: float
    records: list[Record] = field(repr=False)
    results: Results = field(repr=False)
    probe: Probe
    lag: Lag = field(repr=False)

    @property
    def is_met(self) -> bool:
        return self.probe.verdict == "met"


async def find_goodput(
    loop: OpenLoop,
    offered: Offered,
    slo: SLO,
    search: RateSearch,
    duration_s: float,
    stop: asyncio.Event,
    on_trial: Callable[[Trial], None],
) -> list[Trial]:
    """Try rates until the search ends or ``stop`` is set.

    Parameters
    ----------
    offered
        Lengths and how bursty arrivals are; drawn anew, with the same seed, at every rate.
    duration_s
        Of one run; longer when it would hold fewer than 100 requests.
    on_trial
        Told after each run.
    """
    trials: list[Trial] = []
    while (rate := search.next_rate()) is not None:
        num_requests = max(MIN_REQUESTS, round(rate * duration_s))
        load = offered.lengths.resample(num_requests, rate, offered.seed, offered.arrivals)
        records, lag = await loop.run(load, Watch(slo, num_requests))
        if stop.is_set():
            break
        results = Results.of([records])
        probe = judged(rate, slo, results, num_requests)
        trial = Trial(rate, records, results, probe, lag)
        search.note(rate, trial.is_met)
        trials.append(trial)
        on_trial(trial)
        if not results.is_ok.all():
            await asyncio.sleep(_SETTLE_S)
    return trials


def best_of(trials: list[Trial]) -> Trial | None:
    """The highest rate that was met."""
    met = [trial for trial in trials if trial.is_met]
    return max(met, key=lambda trial: trial.rate, default=None)


HEADER = (
    f"{'req/s':>8}{'requests':>10}{'attained':>10}{'TTFT p90 s':>12}{'TPOT p90 s':>12}  verdict"
)


def trial_line(trial: Trial) -> str:
    """A row of the table of rates."""
    quantiles = [trial.results.answered_quantile(name, 0.9) for name in ("ttft_s", "tpot_s")]
    shown = "".join("-".rjust(12) if q is None else f"{q:12.3f}" for q in quantiles)
    probe = trial.probe
    fails = "" if trial.is_met else f" ({probe.limited_by})"
    late = ", but the client itself was late" if trial.lag.is_late else ""
    return (
        f"{trial.rate:8.3f}{probe.num_requests:10d}{probe.attainment:10.1%}{shown}  "
        f"{probe.verdict}{fails}{late}"
    )


_FAILS = {
    "ttft": "too many requests wait too long for their first token",
    "tpot": "too many requests get their tokens too slowly",
    "stability": "waiting times keep growing",
}


def verdict_lines(
    trials: list[Trial], slo: SLO, search: RateSearch, num_instances: int | None
) -> list[str]:
    """What was found, for people, and how far it can be trusted."""
    best = best_of(trials)
    if best is None:
        lines = ["goodput: none of the rates tried meets the SLO"]
        if trials:
            easiest = min(trials, key=lambda trial: trial.rate).results
            quantiles = [easiest.answered_quantile(n, slo.attainment) for n in ("ttft_s", "tpot_s")]
            near = ["none" if q is None else f"{q:.4g} s" for q in quantiles]
            lines.append(f"the lowest rate would meet TTFT {near[0]} and TPOT {near[1]}")
        return lines
    each = f" ({best.rate / num_instances:.4g} per instance)" if num_instances else ""
    lines = [f"goodput: {best.rate:.4g} requests/s{each}"]
    above = [trial for trial in trials if not trial.is_met]
    if above:
        nearest = min(above, key=lambda trial: trial.rate)
        lines.append(f"at {nearest.rate:.4g} requests/s {_FAILS[nearest.probe.limited_by]}")
    elif best.rate >= search.cap:
        lines.append("that is the highest rate tried; it may do better")
    if not best.probe.is_long_enough:
        needed_s = seconds_needed(best.rate, slo, best.results)
        lines.append(
            f"note: to be sure of the long run at this rate a run takes --duration {needed_s:.0f}"
        )
    return lines
