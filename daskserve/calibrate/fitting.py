"""Fits the planner's latency model to one part of the points and judges it on the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from daskserve.calibrate.grid import PHASES, Point
from daskserve.core.placement import Parallelism
from daskserve.planner.latency import CalibratedModel, PaperCoefficients, fit_paper_model
from daskserve.planner.latency.calibration import (
    Coefficients,
    Fitted,
    Growth,
    Phase,
    PhaseError,
)
from daskserve.planner.latency.profile import Profile
from daskserve.planner.model_spec import ModelSpec

LIMIT = 0.10
"""A profile is trusted if half of the held-out points are predicted at least this well."""

HELD_OUT_SHARE = 1 / 3
NUM_RESAMPLES = 300

Times = Mapping[Point, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Split:
    """Points that are fitted, and points that judge the fit."""

    fitted: tuple[Point, ...]
    held_out: frozenset[Point]


def split(points: Sequence[Point], seed: int = 0) -> Split:
    """A third of each phase is held out, drawn at random, but for the ends of every range.

    What lies outside the fitted points would judge extrapolation, which nobody asks of a profile.
    Of every batch one point at least is fitted, since times between batches go up in stairs.
    """
    rng = np.random.default_rng(seed)
    held_out: set[Point] = set()
    for phase in PHASES:
        mine = [point for point in points if point.phase == phase]
        ends = {end(mine, key=key) for end in (min, max) for key in _RANGES}
        inner = [point for point in mine if point not in ends]
        count = round(len(mine) * HELD_OUT_SHARE)
        left = Counter(point.batch for point in mine)
        drawn: list[Point] = []
        for index in rng.permutation(len(inner)):
            point = inner[index]
            if len(drawn) < count and left[point.batch] > 1:
                drawn.append(point)
                left[point.batch] -= 1
        held_out.update(drawn)
    return Split(tuple(p for p in points if p not in held_out), frozenset(held_out))


_RANGES = (
    lambda point: (point.total_tokens, point.batch),
    lambda point: (point.batch, point.tokens),
    lambda point: (point.tokens, point.batch),
)


def fit(
    model: ModelSpec, medians_s: Mapping[Point, float], as_printed: bool = False
) -> PaperCoefficients:
    """Least squares on relative errors, no coefficient below 0.

    Unless in the paper's form ``as_printed``, prompts cost something by themselves, and decode
    steps grow between the batch sizes of the points.
    """
    rows = list(medians_s.items())
    if as_printed:
        return fit_paper_model(model, _profile(rows)).coefficients[1]
    return _fit(model, rows, _batches(medians_s))


def _batches(points: Iterable[Point]) -> tuple[int, ...]:
    return tuple(sorted({point.batch for point in points if point.phase == "decode"}))


def _fit(
    model: ModelSpec, rows: Sequence[tuple[Point, float]], knots: Sequence[int]
) -> PaperCoefficients:
    return fit_paper_model(model, _profile(rows), knots, per_prompt=True).coefficients[1]


def fit_with_intervals(
    model: ModelSpec, times: Times, fitted: Sequence[Point], seed: int = 0
) -> tuple[PaperCoefficients, Coefficients]:
    """The fit to the medians, and where 90 % of refits lie to points and repeats drawn anew."""
    found = fit(model, {point: float(np.median(times[point])) for point in fitted})
    knots = _batches(fitted)
    rng = np.random.default_rng(seed)
    refits = []
    for _ in range(NUM_RESAMPLES):
        rows = []
        for phase in PHASES:
            mine = [point for point in fitted if point.phase == phase]
            for index in rng.integers(0, len(mine), len(mine)):
                again = rng.choice(times[mine[index]], len(times[mine[index]]))
                rows.append((mine[index], float(np.median(again))))
        refits.append(_flat(_fit(model, rows, knots)))
    low, high = np.quantile(refits, (0.05, 0.95), axis=0)
    values = [
        {"value": value, "low": least, "high": most}
        for value, least, most in zip(_flat(found), low.tolist(), high.tolist(), strict=True)
    ]
    *names, growth = Coefficients.model_fields
    single, grown = values[: len(names)], values[len(names) :]
    intervals = dict(zip(names, [Fitted(**one) for one in single], strict=True))
    growing = [Growth(batch=batch, **one) for batch, one in zip(knots, grown, strict=True)]
    return found, Coefficients.model_validate(intervals | {growth: growing})


def _flat(found: PaperCoefficients) -> list[float]:
    added = [value for _, value in found.growth]
    return [found.c1, found.c2, found.c3, found.per_prompt, found.c4, found.c5, *added]


def _profile(rows: Sequence[tuple[Point, float]]) -> Profile:
    points = [point for point, _ in rows]
    columns = {
        "phase": [point.phase for point in points],
        "tokens": [float(point.tokens) for point in points],
        "batch": [float(point.batch) for point in points],
        "tp": [1.0] * len(points),
        "latency_s": [step_s for _, step_s in rows],
    }
    return Profile(xr.Dataset({name: ("row", values) for name, values in columns.items()}))


def predict(latency: CalibratedModel, points: Sequence[Point]) -> dict[Point, float]:
    """Seconds of each step by itself, the physics guard included."""
    alone = latency.alone()
    step = alone.step_times(alone.model, alone.hardware, Parallelism())
    return {
        point: step.prefill_s(point.total_tokens, point.batch * point.tokens**2, point.batch)
        if point.phase == "prefill"
        else step.decode_s(point.batch, point.total_tokens)
        for point in points
    }


def judge(
    split_points: Split,
    medians_s: Mapping[Point, float],
    predicted_s: Mapping[Point, float],
    paper_s: Mapping[Point, float],
) -> dict[Phase, PhaseError]:
    """Errors of each phase at the held-out points."""
    answers: dict[Phase, PhaseError] = {}
    for phase in PHASES:
        held_out = [point for point in split_points.held_out if point.phase == phase]
        errors = [abs(predicted_s[point] / medians_s[point] - 1.0) for point in held_out]
        of_paper = [abs(paper_s[point] / medians_s[point] - 1.0) for point in held_out]
        answers[phase] = PhaseError(
            num_fitted=sum(point.phase == phase for point in split_points.fitted),
            num_held_out=len(held_out),
            median=float(np.median(errors)),
            p90=float(np.quantile(errors, 0.9)),
            limit=LIMIT,
            paper_median=float(np.median(of_paper)),
        )
    return answers


def why_not(
    errors: Mapping[Phase, PhaseError],
    medians_s: Mapping[Point, float],
    predicted_s: Mapping[Point, float],
) -> list[str]:
    """Why a fit is not to be trusted, with its worst points; empty for a good one."""
    reasons = []
    for phase, error in errors.items():
        if error.median > error.limit:
            off = {p: predicted_s[p] / medians_s[p] - 1.0 for p in medians_s if p.phase == phase}
            worst = sorted(off, key=lambda point: -abs(off[point]))[:3]
            shown = ", ".join(
                f"{point.batch} x {point.tokens} {off[point]:+.0%}" for point in worst
            )
            reasons.append(
                f"{phase}: the median error at held-out points is {error.median:.1%}, above the"
                f" limit of {error.limit:.0%}; worst: {shown}"
            )
    return reasons
