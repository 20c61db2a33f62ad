"""Closed forms against the worked example, the paper's curves and simulated queues."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.core.placement import Parallelism
from daskserve.errors import InvalidParameter, WorkloadError
from daskserve.planner.queueing import (
    DecodeRoofline,
    PrefillQueue,
    crossing_rate,
    kv_bytes_per_s,
    kv_transfer_s,
    lindley_waits_s,
    md1_wait_s,
    mg1_wait_s,
    prefill_s,
    ridge_point,
    two_way_crossing_rate,
)
from daskserve.planner.worked_example import ClosedForm

D = 0.15
K = 1.6
KV_BYTES = 327_680
H100_BYTES_PER_S = 3.35e12
H100_FLOPS = 989e12
PAIR = DecodeRoofline(140e9, KV_BYTES, memory_bytes=160e9, bytes_per_s=H100_BYTES_PER_S)


@pytest.mark.parametrize("rate", [0.0, 1.0, 3.0, 6.0])
def test_equations_1_to_3(rate):
    assert PrefillQueue.of(D).mean_ttft_s(rate) == pytest.approx(
        D + rate * D**2 / (2 * (1 - rate * D))
    )
    assert PrefillQueue.of(D, pp=2).mean_ttft_s(rate) == pytest.approx(
        D + rate * D**2 / (4 * (2 - rate * D))
    )
    assert PrefillQueue.of(D, speedup=K).mean_ttft_s(rate) == pytest.approx(
        D / K + rate * D**2 / (2 * K * (K - rate * D))
    )


def test_stability_limits():
    assert PrefillQueue.of(D, speedup=K).stability_limit == pytest.approx(10.67, abs=0.005)
    assert PrefillQueue.of(D, pp=2).stability_limit == pytest.approx(13.33, abs=0.005)
    assert PrefillQueue.of(D).mean_ttft_s(1 / D) == math.inf


def test_the_curves_of_the_worked_example_cross_at_7_30():
    tensor, pipeline = PrefillQueue.of(D, speedup=K), PrefillQueue.of(D, pp=2)
    rate = crossing_rate(tensor, pipeline)
    assert rate == pytest.approx(7.30, abs=0.005)
    assert crossing_rate(pipeline, tensor) == pytest.approx(rate)
    assert two_way_crossing_rate(D, K) == pytest.approx(rate)
    assert tensor.mean_ttft_s(rate - 0.1) < pipeline.mean_ttft_s(rate - 0.1)
    assert tensor.mean_ttft_s(rate + 0.1) > pipeline.mean_ttft_s(rate + 0.1)


def test_the_crossing_moves_up_with_the_speedup():
    rates = [two_way_crossing_rate(D, speedup) for speedup in (1.0, 1.2, 1.4, 1.6, 1.8, 2.0)]
    assert rates == sorted(rates)
    assert rates[0] == 0.0  # no speed-up: the pipeline always wins
    assert rates[-1] == pytest.approx(2 / D)  # a perfect one: tensor parallel always wins


@given(
    st.tuples(st.floats(0.01, 1.0), st.floats(1, 6), st.integers(1, 8), st.floats(0, 0.1)),
    st.tuples(st.floats(0.01, 1.0), st.floats(1, 6), st.integers(1, 8), st.floats(0, 0.1)),
)
def test_a_crossing_is_where_the_faster_one_changes(first, second):
    queues = [
        PrefillQueue.of(device_s, speedup, pp, overhead)
        for device_s, speedup, pp, overhead in (first, second)
    ]
    rate = crossing_rate(*queues)
    limit = min(queue.stability_limit for queue in queues)
    if rate is None:
        below, above = (
            [queue.mean_ttft_s(share * limit) for queue in queues] for share in (0.0, 1 - 1e-9)
        )
        assert (below[0] - below[1]) * (above[0] - above[1]) >= 0
    else:
        assert 0 <= rate <= limit
        waits = [queue.mean_ttft_s(rate) for queue in queues]
        if max(waits) < 1e3:  # closer to saturation rounding decides
            assert waits[0] == pytest.approx(waits[1], rel=1e-5)


@given(
    st.floats(0.01, 1.0), st.floats(1, 6), st.integers(1, 8), st.floats(0, 0.1), st.floats(0.01, 5)
)
def test_the_highest_rate_meets_the_limit_exactly(device_s, speedup, pp, overhead, ttft_s):
    queue = PrefillQueue.of(device_s, speedup, pp, overhead)
    rate = queue.highest_rate(ttft_s)
    assert 0 <= rate < queue.stability_limit
    if ttft_s > queue.latency_s:
        assert queue.mean_ttft_s(rate) == pytest.approx(ttft_s)
    else:
        assert rate == 0


def test_highest_rates_of_the_worked_example():
    example = ClosedForm()
    for tp, pp, expected in ((1, 5, 27.3), (2, 5, None), (4, 2, None), (8, 1, None)):
        queue = PrefillQueue.of(0.145, tp**0.678, pp, stage_overhead=0.02)
        rate = queue.highest_rate(0.25)
        assert rate == pytest.approx(example.prefill_rate(Parallelism(tp, pp)))
        assert expected is None or rate == pytest.approx(expected, abs=0.05)


def test_ridge_points_and_prefill_time():
    assert ridge_point(312e12, 2.0e12) == pytest.approx(156)
    assert ridge_point(H100_FLOPS, H100_BYTES_PER_S) == pytest.approx(295, abs=0.5)
    assert prefill_s(70e9, 512, H100_FLOPS) == pytest.approx(0.145, abs=0.0005)


def test_decode_memory_of_two_h100():
    assert PAIR.kv_budget_bytes == 20e9
    assert PAIR.most_requests(1024) == 59
    full = DecodeRoofline(140e9, KV_BYTES, memory_bytes=80e9, bytes_per_s=H100_BYTES_PER_S)
    assert full.most_requests(1024) == 0


def test_a_larger_decode_batch_is_nearly_free():
    lone, many = PAIR.tpot_s(1, 1024), PAIR.tpot_s(32, 1024)
    assert many * 1000 == pytest.approx(45, abs=0.5)
    assert 1.07 < many / lone < 1.085
    assert PAIR.tokens_per_s(32, 1024) / PAIR.tokens_per_s(1, 1024) == pytest.approx(30, abs=0.5)
    halved = DecodeRoofline(140e9, KV_BYTES, 160e9, bytes_per_s=2 * H100_BYTES_PER_S)
    assert halved.tpot_s(32, 1024) * 1000 == pytest.approx(22.5, abs=0.05)


def test_arithmetic_binds_decode_beyond_the_ridge_point():
    rooflines = DecodeRoofline(140e9, 1.0, 160e9, H100_BYTES_PER_S, 140e9, H100_FLOPS)
    below, above = rooflines.tpot_s(294, 1), rooflines.tpot_s(590, 1)
    assert below == pytest.approx(140e9 / H100_BYTES_PER_S)
    assert above == pytest.approx(590 * 140e9 / H100_FLOPS)


def test_kv_transfer_of_one_prompt():
    assert 512 * KV_BYTES == pytest.approx(168e6, rel=0.002)
    assert kv_transfer_s(512, KV_BYTES, 450e9) * 1000 == pytest.approx(0.37, abs=0.005)
    assert kv_transfer_s(512, KV_BYTES, 25e9 / 8) * 1000 == pytest.approx(54, abs=0.5)


def test_the_link_that_a_prefill_instance_needs():
    needed = kv_bytes_per_s(25, 512, KV_BYTES)
    assert needed == pytest.approx(4.2e9, rel=0.005)
    assert needed > 25e9 / 8
    opt_66b = 2 * 64 * 9216 * 2
    assert opt_66b * 512 / 2**30 == pytest.approx(1.13, abs=0.01)
    assert kv_bytes_per_s(10, 512, opt_66b) / 2**30 == pytest.approx(11.3, abs=0.1)


def test_lindley_equals_the_recursion_step_by_step():
    generator = np.random.default_rng(3)
    arrival = np.cumsum(generator.exponential(1.0, 5000))
    service = generator.exponential(0.8, 5000)
    waits, wait = [], 0.0
    for index in range(5000):
        if index:
            wait = max(0.0, wait + service[index - 1] - (arrival[index] - arrival[index - 1]))
        waits.append(wait)
    np.testing.assert_allclose(lindley_waits_s(arrival, service), waits, atol=1e-9)
    assert lindley_waits_s([], []).size == 0


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_mean_waits_agree_with_simulated_queues(load):
    generator = np.random.default_rng(11)
    arrival = np.cumsum(generator.exponential(1.0, 1_000_000))
    same = np.full(len(arrival), load)
    assert lindley_waits_s(arrival, same).mean() == pytest.approx(md1_wait_s(1.0, load), rel=0.03)
    varied = generator.gamma(4.0, load / 4.0, len(arrival))
    expected = mg1_wait_s(1.0, load, load**2 * (1 + 1 / 4))
    assert lindley_waits_s(arrival, varied).mean() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_numbers_that_mean_nothing_are_refused_by_name(bad):
    for call in (
        lambda: PrefillQueue.of(bad),
        lambda: PrefillQueue.of(D).highest_rate(bad),
        lambda: md1_wait_s(1.0, bad),
        lambda: ridge_point(bad, 1.0),
        lambda: kv_transfer_s(1, 1, bad),
        lambda: DecodeRoofline(140e9, bad, 160e9, 1e12),
        lambda: PAIR.most_requests(bad),
        lambda: two_way_crossing_rate(bad, K),
    ):
        with pytest.raises(InvalidParameter, match="must be"):
            call()


def test_impossible_queues_are_refused():
    with pytest.raises(InvalidParameter, match="speedup"):
        PrefillQueue.of(D, speedup=0.5)
    with pytest.raises(InvalidParameter, match="pp"):
        PrefillQueue.of(D, pp=0)
    with pytest.raises(InvalidParameter, match="at most latency_s"):
        PrefillQueue(latency_s=0.1, bottleneck_s=0.2)
    with pytest.raises(InvalidParameter, match="mean_square"):
        mg1_wait_s(1.0, 0.5, 0.1)
    with pytest.raises(InvalidParameter, match="1..2"):
        two_way_crossing_rate(D, 2.5)
    with pytest.raises(WorkloadError, match="not sorted"):
        lindley_waits_s([1.0, 0.5], [0.1, 0.1])
    with pytest.raises(WorkloadError, match="one service time each"):
        lindley_waits_s([1.0], [0.1, 0.1])
