"""What is read out of the timelines of a service."""

from __future__ import annotations

import math

import pytest

from daskserve.calibrate.grid import Point
from daskserve.calibrate.handing_over import (
    OUTPUT_TOKENS,
    HandOver,
    link_of,
    overheads_of,
    transfers_of,
)
from daskserve.core.request import Timeline

STEPS = {Point("prefill", 1, 64): [0.100, 0.102, 0.101], Point("decode", 1, 64): [0.020, 0.021]}


def answer(tokens: int, extra_s: float = 0.0) -> HandOver:
    decode_s = (OUTPUT_TOKENS - 1) * (0.0205 + extra_s)
    return HandOver(
        tokens, Timeline(0.003, 0.101 + extra_s, 0.001 + tokens * 16 / 1e6, 0.002, decode_s)
    )


def test_the_link_is_the_line_through_the_transfers():
    points = transfers_of([answer(n) for n in (64, 64, 256, 1024)], page_bytes=256, block_size=16)
    assert [point.kv_bytes for point in points] == [1024, 4096, 16384]
    assert [point.num_repeats for point in points] == [2, 1, 1]
    assert link_of(points) == pytest.approx((0.001, 1e6))


def test_bytes_that_make_no_difference_give_no_bandwidth():
    points = transfers_of([answer(64)] * 2, page_bytes=256, block_size=16)
    more = points[0].model_copy(update={"kv_bytes": 4096, "median_s": points[0].median_s / 2})
    assert link_of([*points, more])[1] == math.inf


def test_overheads_are_what_the_steps_do_not_explain():
    found = overheads_of([answer(64, 0.004), answer(64, 0.004), answer(512)], STEPS, 0.0007)
    assert found.dispatch.median_s == pytest.approx(0.003)
    assert found.hand_over.median_s == pytest.approx(0.002)
    assert found.prefill_extra.median_s == pytest.approx(0.004)
    assert found.decode_extra.median_s == pytest.approx(0.004)
    assert found.kv_latency_s == 0.0007


def test_steps_that_are_shorter_in_a_service_count_as_equal():
    found = overheads_of([answer(64, -0.01)], STEPS, 0.0)
    assert found.prefill_extra.median_s == found.decode_extra.median_s == 0.0
