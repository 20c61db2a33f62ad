"""The highest rate at which enough requests of every class meet both limits, in the long run.

Every seed gets a bisection of its own; the answer is their mean with a 90 % interval. What is
not a rate is one of five other answers, and none is mistaken for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from scipy import stats

from daskserve.errors import InvalidParameter
from daskserve.planner.arrivals import ArrivalProcess, cycle_s, fit_arrivals
from daskserve.planner.capacity import capacity_guess
from daskserve.planner.simulator import Deployment
from daskserve.planner.simulator.driving import Simulation, run_arrays
from daskserve.planner.simulator.result import tpot_s, ttft_s
from daskserve.planner.slo_classes import (
    AnySLO,
    ClassShare,
    SLOClasses,
    of_class,
    shares_of,
)
from daskserve.planner.stationarity import (
    FIRST_LOOK,
    Probe,
    first_look,
    judge,
    most_requests,
    requests_needed,
)
from daskserve.planner.workload import Workload

STATUSES = ("found", "at_least_cap", "infeasible", "unstable", "no_data", "error")

MAX_REQUESTS = 100_000
_ALONE_S = 1e4  # between requests that are not to meet
_MAX_DOUBLINGS = 60


@dataclass(frozen=True, slots=True)
class BestReachable:
    """What requests of a class see when nothing else runs: no rate can do better.

    Parameters
    ----------
    share
        How many meet both limits.
    ttft_s, tpot_s
        Limits that the target share would meet, each by itself: the nearest feasible SLO. TPOT
        is None when no request has one.
    rejected
        Share that no KV pool could ever hold.
    """

    share: ClassShare
    ttft_s: float
    tpot_s: float | None
    rejected: float = 0.0

    @property
    def attainment(self) -> float:
        return self.share.attainment


@dataclass(frozen=True, slots=True)
class Goodput:
    """The answer of `goodput`.

    Parameters
    ----------
    status
        ``found``; ``at_least_cap`` (the cap itself was tried and met); ``infeasible`` (not even
        a request alone meets the limits); ``unstable`` (no steady state was found at any rate);
        ``no_data`` (an empty workload); ``error`` (the simulation failed).
    rate
        Requests/s of the whole deployment, for ``found`` and ``at_least_cap``; else None.
    low, high
        90 % interval of the rate over seeds; None without a rate, ``high`` also at the cap.
    limited_by
        What fails just above the rate: ``ttft``, ``tpot`` or ``stability``.
    limiting_class
        The class whose limit that is; empty when one SLO is for all, or for stability.
    reason
        One sentence for people.
    best
        The best that can be reached by the class that is furthest from its target; None for
        ``no_data`` and ``error``.
    by_seed
        The rate of each seed.
    probes
        Every run that was judged.
    """

    status: str
    rate: float | None = None
    low: float | None = None
    high: float | None = None
    limited_by: str | None = None
    limiting_class: str = ""
    reason: str = ""
    best: BestReachable | None = None
    by_seed: tuple[float, ...] = ()
    probes: tuple[Probe, ...] = field(default=(), repr=False)

    @property
    def classes(self) -> tuple[ClassShare, ...]:
        """What each class attained at the highest rate that was met; none without a rate."""
        met = [probe for probe in self.probes if probe.verdict == "met"]
        return max(met, key=lambda probe: probe.rate).classes if met else ()


def goodput(
    workload: Workload,
    deployment: Deployment,
    slo: AnySLO,
    *,
    max_rate: float | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    tolerance: float = 0.01,
    max_requests: int = MAX_REQUESTS,
    arrivals: ArrivalProcess | None = None,
) -> Goodput:
    """Highest rate at which ``attainment`` of the requests of every class meet both limits.

    Parameters
    ----------
    workload
        Lengths, classes, and how bursty the arrivals are; resampled at every rate.
    slo
        One for all requests, or one for each class by name.
    max_rate
        Do not look above this many requests/s; None looks as far as it goes.
    seeds
        One bisection each.
    tolerance
        Relative width at which a bisection ends.
    max_requests
        Most requests of one run, unless a few lives of a request take more at that rate; a rate
        that shows no steady state by then is not goodput.
    arrivals
        None fits a process to the workload.
    """
    _check(max_rate, seeds, tolerance, max_requests)
    if len(workload) == 0:
        return Goodput("no_data", reason="the workload holds no requests")
    classes = SLOClasses.of(slo)
    classes.check(workload)
    try:
        alone = best_reachable(workload, deployment, classes, seeds[0])
        best = min(alone, key=lambda one: one.share.room)
        if not best.share.is_met:
            return Goodput("infeasible", reason=_why_infeasible(best), best=best)
        runs = _Runs(workload, deployment, classes, max_requests, arrivals)
        start = 0.5 * capacity_guess(workload, deployment, classes)
        found: list[_Bracket] = []
        for seed in seeds:
            start = found[-1].low if found and found[-1].low > 0 else start
            found.append(_bisect(partial(runs.probe, seed), start, max_rate, tolerance))
    except Exception as error:  # a crash is an answer of its own, never "infeasible"
        return Goodput("error", reason=f"{type(error).__name__}: {error}")
    return _summed_up(found, max_rate, best, tuple(runs.probes))


def probe_rate(
    workload: Workload,
    deployment: Deployment,
    slo: AnySLO,
    rate: float,
    seed: int = 0,
    max_requests: int = MAX_REQUESTS,
    arrivals: ArrivalProcess | None = None,
) -> Probe:
    """What one rate shows, in a run as long as a steady state needs; looks for no other rate."""
    classes = SLOClasses.of(slo)
    return _Runs(workload, deployment, classes, max_requests, arrivals).probe(seed, rate)


def best_reachable(
    workload: Workload, deployment: Deployment, slo: SLOClasses, seed: int
) -> list[BestReachable]:
    """Requests of each class one by one, each alone in the deployment."""
    _, prompt, output = workload.arrays()
    index = slo.index_of(workload)
    found = []
    for place in range(len(slo.names)):
        rows = np.flatnonzero(index == place)
        count = min(max(len(rows), FIRST_LOOK), 4 * FIRST_LOOK)
        if len(rows) > count:
            rows = rows[np.random.default_rng(seed).integers(0, len(rows), count)]
        apart_s = _ALONE_S * np.arange(len(rows))
        done, _ = run_arrays(deployment, apart_s, prompt[rows], output[rows])
        found.append(_reached(slo, place, ttft_s(done), tpot_s(done)))
    return found


def _reached(slo: SLOClasses, place: int, ttft: np.ndarray, tpot: np.ndarray) -> BestReachable:
    target, with_tpot = slo.slos[place].attainment, tpot[~np.isnan(tpot)]
    return BestReachable(
        share=shares_of(slo, np.full(len(ttft), place), ttft, tpot)[place],
        ttft_s=float(np.quantile(np.nan_to_num(ttft, nan=np.inf), target, method="higher")),
        tpot_s=float(np.quantile(with_tpot, target, method="higher")) if len(with_tpot) else None,
        rejected=float(np.isnan(ttft).mean()),
    )


@dataclass(frozen=True, eq=False)
class LongRun:
    """A drawn trace, what became of it, and what that says of the long run."""

    trace: Workload
    done: np.ndarray
    simulation: Simulation
    probe: Probe


def long_run(
    workload: Workload,
    deployment: Deployment,
    slo: SLOClasses,
    rate: float,
    seed: int,
    arrivals: ArrivalProcess,
    max_requests: int = MAX_REQUESTS,
) -> LongRun:
    """Look at a rate, first briefly; what seems met is run until it is steady or hopeless."""
    output_tokens = float(workload.arrays()[2].mean())
    rarest = int(np.bincount(slo.index_of(workload)).min()) / len(workload)
    most = most_requests(rate, slo, output_tokens, max_requests, rarest)
    num_requests = first_look(rate, cycle_s(arrivals), most)
    while True:
        trace = workload.resample(num_requests, rate, seed, arrivals)
        done, simulation = run_arrays(deployment, *trace.arrays())
        index = slo.index_of(trace)
        probe = judge(rate, slo, done, index)
        decided = probe.is_surely_missed or (probe.is_long_enough and not probe.is_drifting)
        if decided or num_requests >= most:
            return LongRun(trace, done, simulation, probe)
        # A tenth more: what is needed varies a little with the run that says so.
        needed = int(1.1 * requests_needed(rate, slo, done, index))
        num_requests = min(max(needed, 2 * num_requests), most)


@dataclass(eq=False)
class _Runs:
    workload: Workload
    deployment: Deployment
    slo: SLOClasses
    max_requests: int
    arrivals: ArrivalProcess | None
    probes: list[Probe] = field(default_factory=list)

    def probe(self, seed: int, rate: float) -> Probe:
        if self.arrivals is None:
            self.arrivals = fit_arrivals(self.workload.arrays()[0])
        run = long_run(
            self.workload, self.deployment, self.slo, rate, seed, self.arrivals, self.max_requests
        )
        self.probes.append(run.probe)
        return run.probe


@dataclass(slots=True)
class _Bracket:
    """``low`` is met (0: nothing was), ``above`` is the lowest that was not (None: the cap was)."""

    low: float
    above: Probe | None

    @property
    def high(self) -> float:
        return self.above.rate if self.above else self.low


def _bisect(
    probe: Callable[[float], Probe], start: float, cap: float | None, tolerance: float
) -> _Bracket:
    bracket = _Bracket(0.0, None)
    rate = min(start, cap or math.inf)
    step = 1.05  # widens with every step: the start is often close
    for _ in range(_MAX_DOUBLINGS):
        result = probe(rate)
        if result.verdict == "met":
            bracket.low = rate
            if bracket.above is not None or rate == cap:
                break
            rate = min(rate * step, cap or math.inf)
        else:
            bracket.above = result
            if bracket.low > 0:
                break
            rate /= step
        step = min(step**2, 4.0)
    while 0 < bracket.low and bracket.high > bracket.low * (1 + tolerance):
        result = probe(math.sqrt(bracket.low * bracket.high))
        if result.verdict == "met":
            bracket.low = result.rate
        else:
            bracket.above = result
    return bracket


def _summed_up(
    found: list[_Bracket], cap: float | None, best: BestReachable, probes: tuple[Probe, ...]
) -> Goodput:
    if any(bracket.low == 0 for bracket in found):
        reason = (
            "requests alone meet the limits, but no rate showed a steady state;"
            " raise max_requests or look at how bursty the arrivals are"
        )
        return Goodput("unstable", reason=reason, best=best, probes=probes)
    rates = np.array([bracket.low for bracket in found])
    rate = float(rates.mean())
    low, high = _interval(found)
    answer = Goodput(
        "found", rate, low, high, best=best, by_seed=tuple(rates.tolist()), probes=probes
    )
    if all(bracket.above is None for bracket in found):
        reason = f"{cap:g} requests/s, the cap, is met"
        return replace(answer, status="at_least_cap", rate=cap, high=None, reason=reason)
    limits = [_limit(bracket.above) for bracket in found if bracket.above]
    limited_by, name = max(sorted(set(limits)), key=limits.count)
    reason = f"{rate:.4g} requests/s are met; above that {_FAILS[limited_by]}".format(
        of_class(name)
    )
    return replace(answer, limited_by=limited_by, limiting_class=name, reason=reason)


def _limit(probe: Probe) -> tuple[str, str]:
    """What fails in a run, and of which class; a queue grows for all classes."""
    is_of_all = probe.limited_by == "stability"
    return probe.limited_by, "" if is_of_all else probe.binding.name


_FAILS = {
    "ttft": "too many requests{} wait too long for their first token",
    "tpot": "too many requests{} get their tokens too slowly",
    "stability": "the queue grows without end",
}


def _interval(found: list[_Bracket]) -> tuple[float, float]:
    """90 % interval of the mean over seeds; never narrower than the bisections."""
    lows = np.array([bracket.low for bracket in found])
    highs = np.array([bracket.high for bracket in found])
    spread = 0.0
    if len(lows) > 1:
        quantile = stats.t.ppf(0.95, len(lows) - 1)
        spread = float(quantile * lows.std(ddof=1) / math.sqrt(len(lows)))
    return max(float(lows.mean()) - spread, 0.0), float(highs.mean()) + spread


def _why_infeasible(best: BestReachable) -> str:
    whose, target = of_class(best.share.name), best.share.target
    tpot = "" if best.tpot_s is None else f" and TPOT {best.tpot_s:.4g} s"
    if best.rejected > 1 - target:
        return (
            f"{best.rejected:.1%} of the requests{whose} are longer than the KV memory of an"
            " instance: use more GPUs per instance or shorter requests"
        )
    return (
        f"even a request{whose} alone meets the limits in {best.attainment:.1%} of the cases, below"
        f" the target of {target:.1%}; TTFT {best.ttft_s:.4g} s{tpot} can be reached"
    )


def _check(
    max_rate: float | None, seeds: Sequence[int], tolerance: float, max_requests: int
) -> None:
    if max_rate is not None and not (math.isfinite(max_rate) and max_rate > 0):
        raise InvalidParameter("max_rate", max_rate, "must be a finite number above 0")
    if len(seeds) == 0:
        raise InvalidParameter("seeds", seeds, "must hold at least one seed")
    if not 0 < tolerance <= 0.5:
        raise InvalidParameter("tolerance", tolerance, "must be above 0 and at most 0.5")
    if max_requests < 100:
        raise InvalidParameter("max_requests", max_requests, "must be at least 100")
