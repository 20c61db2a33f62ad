"""What is read out of the timelines of a service."""

from __future__ import annotations

import math

import pytest

from daskserve.calibrate.handing_over import HandOver, link_of, transfers_of
from daskserve.core.request import Timeline


def answer(tokens: int) -> HandOver:
    return HandOver(tokens, Timeline(0.003, 0.101, 0.001 + tokens * 16 / 1e6, 0.002, 0.1))


def test_the_link_is_the_line_through_the_transfers():
    points = transfers_of([answer(n) for n in (64, 64, 256, 1024)], page_bytes=256, block_size=16)
    assert [point.kv_bytes for point in points] == [1024, 4096, 16384]
    assert [point.num_repeats for point in points] == [2, 1, 1]
    assert link_of(points) == pytest.approx((0.001, 1e6))


def test_bytes_that_make_no_difference_give_no_bandwidth():
    points = transfers_of([answer(64)] * 2, page_bytes=256, block_size=16)
    more = points[0].model_copy(update={"kv_bytes": 4096, "median_s": points[0].median_s / 2})
    assert link_of([*points, more])[1] == math.inf
