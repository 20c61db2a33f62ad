"""What instances cost each other, read out of traffic that the simulator makes with known costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from daskserve.calibrate.in_service import Answer
from daskserve.calibrate.sharing import (
    decode_slowdown,
    prefill_added_s,
    prefill_slowdown,
    sharing_of,
)
from daskserve.core.placement import Parallelism
from daskserve.core.request import Timeline
from daskserve.planner.hardware import GPU
from daskserve.planner.latency import CalibratedModel
from daskserve.planner.simulator import Deployment, simulate
from daskserve.planner.simulator.result import STAGES
from daskserve.planner.workload import Workload


@pytest.fixture
def step(model, true):
    hardware = GPU("CPU", 1e12, 1e15, 1e14, 1e9, price_per_hour=0.0)
    latency = CalibratedModel(model, hardware, true, 512, 64)
    return latency.step_times(model, hardware, Parallelism())


def apart(step, prefill: float, decode: float) -> Deployment:
    """One instance of each role, with what they cost each other."""
    return Deployment.disaggregated(
        step, 1, step, 1, prefill_slowdown=prefill, decode_slowdown=decode,
        kv_bytes_per_token=1000, link_bandwidth=1e10, link_latency_s=0.001,
    )  # fmt: skip


def answered(rate: float, deployment: Deployment) -> list[Answer]:
    """Requests as the simulator has them."""
    rng = np.random.default_rng(0)
    arrival = np.cumsum(rng.exponential(1 / rate, 120))
    prompt, output = rng.integers(20, 300, 120), rng.integers(8, 48, 120)
    found = simulate(Workload.from_arrays(arrival, prompt, output), deployment).timelines
    stages = np.stack([found[name].values for name in STAGES], axis=1).tolist()
    rows = zip(prompt.tolist(), output.tolist(), arrival.tolist(), stages, strict=True)
    return [Answer(p, o - 1, at, Timeline(*times)) for p, o, at, times in rows]


@pytest.mark.parametrize("rate", [0.1, 0.3])
@pytest.mark.parametrize(("prefill", "decode"), [(0.0, 0.0), (0.1, 0.3), (0.4, 0.05)])
def test_known_costs_are_found_again(step, rate, prefill, decode):
    traffic = answered(rate, apart(step, prefill, decode))
    assert prefill_slowdown(traffic, step) == pytest.approx(prefill, abs=0.02)
    assert decode_slowdown(traffic, step) == pytest.approx(decode, abs=0.03)


@pytest.mark.parametrize(("prefill", "decode"), [(0.0, 0.0), (0.1, 0.3)])
def test_a_colocated_instance_is_slow_by_itself(step, prefill, decode):
    deployment = Deployment.colocated(step.slowed(prefill, decode), 1)
    traffic = answered(0.05, deployment)
    assert prefill_slowdown(traffic, step, is_colocated=True) == pytest.approx(prefill, abs=0.02)
    assert decode_slowdown(traffic, step, is_colocated=True) == pytest.approx(decode, abs=0.03)


@pytest.mark.parametrize("is_colocated", [False, True])
@pytest.mark.parametrize(
    ("added", "following", "share"),
    [(0.0, 0.0, 0.0), (0.3, 0.0, 0.0), (0.1, 0.2, 0.1), (0.0, 0.2, 0.0), (0.0, 0.0, 0.3)],
)
def test_what_every_prefill_step_costs_is_told_from_what_grows_with_it(
    step, added, following, share, is_colocated
):
    alone_s = step.prefill_s(100)
    added_s = added * alone_s
    following_s = following * alone_s * (not is_colocated)  # its KV stays where it is
    longer = replace(
        step,
        prefill_knots_s=step.prefill_knots_s + added_s,
        prefill_following_s=following_s,
    )
    deployment = (
        Deployment.colocated(longer.slowed(share, 0.0), 1)
        if is_colocated
        else apart(longer, share, 0.0)
    )
    traffic = answered(0.2, deployment)
    always_s, next_s = prefill_added_s([traffic], step, is_colocated)
    assert always_s == pytest.approx(added_s * (1.0 + share), abs=0.02 * alone_s)
    assert next_s == pytest.approx(following_s * (1.0 + share), abs=0.02 * alone_s)
    found = sharing_of([traffic], step, is_colocated)
    assert (found.prefill_added_s, found.prefill_following_s) == (always_s, next_s)
    assert found.prefill.mean == pytest.approx(share, abs=0.03)


def test_every_round_counts(step):
    rounds = [answered(0.2, apart(step, share, share)) for share in (0.1, 0.2, 0.9)]
    found = sharing_of(rounds, step, False)
    assert found.prefill.mean == pytest.approx(0.4, abs=0.02)
    assert (found.prefill.num_repeats, found.decode.num_repeats) == (3, 3)
    assert found.prefill.spread > 0.3


def test_roles_that_never_work_at_the_same_time_say_nothing(step):
    one_by_one = answered(1e-4, apart(step, 0.1, 0.1))
    assert sharing_of([one_by_one], step, False) is None
    assert sharing_of([], step, False) is None
