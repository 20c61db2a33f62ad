"""Fits find the coefficients that made the times, and say so when there are none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.calibrate.fitting import (
    LIMIT,
    fit,
    fit_with_intervals,
    judge,
    predict,
    split,
    why_not,
)
from daskserve.calibrate.grid import FULL, QUICK
from daskserve.planner.hardware import GPU
from daskserve.planner.latency import CalibratedModel

FAST = GPU("CPU", 1e12, 1e16, 1e15, 1e10, 0.0)


def flat(found):
    own = [found.c1, found.c2, found.c3, found.per_prompt, found.c4, found.c5]
    return [*own, *(added for _, added in found.growth)]


def judged(model, times, hardware=FAST):
    parts = split(list(times))
    medians_s = {point: float(np.median(values)) for point, values in times.items()}
    found = fit(model, {point: medians_s[point] for point in parts.fitted})
    paper = fit(model, {point: medians_s[point] for point in parts.fitted}, as_printed=True)
    predicted_s, paper_s = (
        predict(CalibratedModel(model, hardware, c, 512, 32), list(times)) for c in (found, paper)
    )
    errors = judge(parts, medians_s, predicted_s, paper_s)
    return errors, why_not(errors, medians_s, predicted_s)


def test_known_coefficients_are_found_again(model, lawful, true):
    medians_s = {point: values[0] for point, values in lawful().items()}
    assert flat(fit(model, medians_s)) == pytest.approx(flat(true), rel=1e-6)


def test_intervals_hold_the_truth_and_shrink_with_the_noise(model, lawful, true):
    widths = []
    for noise in (0.01, 0.1):
        times = lawful(noise)
        _, found = fit_with_intervals(model, times, list(times))
        *names, growth = type(found).model_fields
        first, *grown = getattr(found, growth)
        assert first.low == first.value == first.high == 0.0, "where growth begins"
        each = [*(getattr(found, name) for name in names), *grown]
        truth = [*flat(true)[: len(names)], *flat(true)[len(names) + 1 :]]
        inside = [c.low <= value <= c.high for c, value in zip(each, truth, strict=True)]
        assert sum(inside) >= 10, "a 90 % interval misses one of ten now and then"
        widths.append(np.array([c.high - c.low for c in each]))
    assert len(each) == 12
    assert (widths[0] < widths[1]).all()


def test_a_fit_of_lawful_times_is_trusted(model, lawful):
    errors, reasons = judged(model, lawful(0.03))
    assert reasons == []
    assert all(0 < error.median < 0.05 and error.num_held_out >= 4 for error in errors.values())
    assert errors["decode"].paper_median > 2 * errors["decode"].median, "growth is what is missing"


def test_times_of_another_law_are_not_trusted_and_the_worst_step_is_named(model, lawful):
    times = lawful(0.01)
    for point in times:
        if point.phase == "decode" and point.tokens == 256:
            times[point] = [5 * value for value in times[point]]
    errors, reasons = judged(model, times)
    assert errors["decode"].median > LIMIT > errors["prefill"].median
    assert len(reasons) == 1 and reasons[0].startswith("decode: ") and "worst: " in reasons[0]


def test_what_is_faster_than_the_hardware_is_raised_and_so_not_trusted(model, lawful):
    weights = model.weight_bytes_read(1.0)
    slow = GPU("CPU", 1e12, 1e16, weights / 60.0, 1e10, 0.0)  # a minute for reading the weights
    errors, reasons = judged(model, lawful(0.01), slow)
    assert len(reasons) == 2
    assert min(error.median for error in errors.values()) > 1.0


@given(seed=st.integers(0, 2**32 - 1), grid=st.sampled_from([QUICK, FULL]))
def test_held_out_points_lie_within_the_fitted_ranges(seed, grid):
    points = grid.points(4096, 64, 10_000, 16)
    parts = split(points, seed)
    assert sorted([*parts.fitted, *parts.held_out]) == sorted(points)
    for phase in ("prefill", "decode"):
        held_out = [point for point in parts.held_out if point.phase == phase]
        fitted = [point for point in parts.fitted if point.phase == phase]
        assert 3 <= len(held_out) <= len(fitted)
        for name in ("batch", "tokens", "total_tokens"):
            ends = [getattr(point, name) for point in fitted]
            assert all(min(ends) <= getattr(point, name) <= max(ends) for point in held_out)
