"""Steps that take longer now than then say so, and times in a service are put beside them."""

from __future__ import annotations

import itertools

import pytest

from daskserve.calibrate.grid import FULL, QUICK, Point
from daskserve.calibrate.handing_over import HandOver
from daskserve.calibrate.in_service import Answer, DecodeSteps
from daskserve.calibrate.pace import Pace, typical
from daskserve.calibrate.service_fit import Served
from daskserve.core.request import Timeline


class Slow:
    """Stands where a rig is: everything takes 1.2 s, but one in four measurements is disturbed."""

    def __init__(self) -> None:
        self._times = itertools.cycle([1.2, 1.2, 9.9, 1.2])

    def seconds(self, point: Point) -> float:
        return next(self._times)


def test_a_disturbed_measurement_does_not_count():
    then_s = dict.fromkeys(QUICK.points(2048, 64, 10_000, 16), 1.0)
    assert Pace(Slow(), then_s).off() == pytest.approx(0.2)


@pytest.mark.parametrize("grid", [FULL, QUICK])
def test_typical_steps_are_of_both_kinds_and_of_the_grid(grid):
    points = grid.points(2048, 64, 10_000, 16)
    chosen = typical(points)
    assert [point.phase for point in chosen] == ["prefill", "prefill", "decode", "decode"]
    assert len(set(chosen)) == 4 and set(chosen) <= set(points)
    assert all(20 < point.total_tokens < 4000 for point in chosen)


def test_every_time_in_a_service_is_put_at_another_pace():
    hand_over = HandOver(10, Timeline(1.0, 2.0, 3.0, 4.0, 5.0))
    answer = Answer(10, 4, 8.0, Timeline(1.0, 1.0, 1.0, 1.0, 1.0))
    served = Served([hand_over], [hand_over], [DecodeSteps(2, 20.0, 6.0)], [[answer]], False)
    there = served.at_pace(0.5)
    halves = Timeline(0.5, 1.0, 1.5, 2.0, 2.5)
    assert [one.timeline for one in (*there.apart, *there.alone)] == [halves, halves]
    assert there.decodes == [DecodeSteps(2, 20.0, 3.0)]
    assert (there.traffic[0][0].submitted_at, there.traffic[0][0].ended_at) == (4.0, 6.5)
