"""Simulating a placement says what planning it said."""

from __future__ import annotations

import numpy as np
import pytest

from daskserve.core.slo import SLO
from daskserve.planner.arrivals import Bursts
from daskserve.planner.goodput import probe_rate
from daskserve.planner.hardware import Cluster
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.planning import plan
from daskserve.planner.replay import deployment_of_placement, replay
from daskserve.planner.workload import Workload

MODEL = ModelSpec.load("llama-3.1-8b")
SLO_ = SLO(0.3, 0.05)
RATE = 15.0


@pytest.fixture(scope="module")
def bursty() -> Workload:
    arrival_s = Bursts(5.0, 20.0, 0.3).sample(4000, 10.0, np.random.default_rng(0))
    return Workload.from_arrays(arrival_s, np.full(4000, 300), np.full(4000, 40))


@pytest.mark.slow
def test_a_bursty_trace_is_drawn_as_long_as_for_the_plan(bursty):
    request = PlanRequest(MODEL, Cluster.of("H100", 2), bursty, SLO_, rate=RATE, seeds=(0,))
    placement, latency = plan(request).placement, request.step_source
    told = replay(placement, MODEL, latency, bursty, SLO_, rate=RATE, seeds=(0,))
    deployment = deployment_of_placement(placement, MODEL, latency)
    assert told.probes == (probe_rate(bursty, deployment, SLO_, RATE, 0),)
    assert told.probes[0].verdict == "met" and told.is_met
    short = replay(placement, MODEL, latency, bursty, SLO_, rate=RATE, seeds=(0,), num_requests=500)
    assert short.probes[0].num_requests == 500
