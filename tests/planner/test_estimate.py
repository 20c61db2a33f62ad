"""Answers by formula: quick, monotone, and never short of what is asked by their own measure."""

from __future__ import annotations

import pytest

from daskserve.core.slo import SLO
from daskserve.planner.estimate import COLOCATED, DISAGGREGATED, estimate, sized_evaluator
from daskserve.planner.hardware import Cluster
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.plan_record import PlanRecord, estimated, lightest, record_of
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.planning import plan
from daskserve.planner.workload import Workload


def asked(rate: float = 20.0, **changes) -> PlanRequest:
    given = {
        "model": ModelSpec.load("opt-13b"),
        "cluster": Cluster.of("A100", 4, 8),
        "workload": Workload.from_arrays([0.0], [512], [128]),
        "slo": SLO(0.25, 0.1),
        "seeds": (0,),
        "max_requests": 30_000,
    }
    return PlanRequest(rate=rate, **{**given, **changes})


def test_both_ways_serve_the_rate_and_the_lighter_one_is_first():
    for rate in (3.0, 20.0, 110.0):
        first, second = estimate(asked(rate))
        assert {first.name, second.name} == {DISAGGREGATED, COLOCATED}
        assert first.num_gpus <= second.num_gpus
        assert all(one.rate >= rate and one.fits for one in (first, second))
        assert first.price_per_hour == pytest.approx(1.8 * first.num_gpus)


def test_no_single_instance_fewer_would_do():
    request = asked(60.0)
    sized = sized_evaluator(request)
    for one in estimate(request, sized):
        for group in one.unit.groups:
            if group.count > 1:
                fewer = tuple(
                    g if g is not group else type(g)(g.role, g.parallelism, g.count - 1, g.gpu)
                    for g in one.unit.groups
                )
                unit = type(one.unit)(fewer, chunk_tokens=one.unit.chunk_tokens)
                assert sized.evaluate([unit])[0].rate < 60.0


def test_more_is_needed_for_more():
    sized = sized_evaluator(asked())
    counts = [
        {one.name: one.num_gpus for one in estimate(asked(rate), sized)}
        for rate in (5.0, 20.0, 40.0, 80.0)
    ]
    for name in (DISAGGREGATED, COLOCATED):
        of_name = [one[name] for one in counts]
        assert of_name == sorted(of_name)


def test_what_cannot_be_is_said():
    too_much = estimated(asked(5000.0), {})
    assert too_much.chosen is None and "32 GPUs" in too_much.reason
    never = estimated(asked(slo=SLO(0.0001, 0.1)), {})
    assert never.chosen is None and "no split" in never.reason
    assert PlanRecord.from_record(too_much.to_record()) == too_much


def test_an_estimate_names_what_binds():
    record = estimated(asked(), {"rate": 20})
    assert record.status == "estimate" and record.chosen.is_usable
    assert all("limited by" in way.binding for way in record.ways)


@pytest.mark.slow
def test_a_plan_is_recorded_with_its_curves_and_front():
    request = asked(20.0, cluster=Cluster.of("A100", 1, 8))
    record = record_of(plan(request), request, {"rate": 20.0})
    assert record.status == "found" and record.chosen.num_gpus <= 8
    assert PlanRecord.from_record(record.to_record()) == record
    assert len(record.curves) == 2
    for curve in record.curves:
        assert curve.attainment[0] > 0.95 and curve.attainment[-1] < curve.attainment[0]
    at_rate = [c.attainment[c.rates.index(20.0)] for c in record.curves]
    assert max(at_rate) >= record.target
    best = lightest(record.front)
    assert [p.num_gpus for p in best] == sorted(p.num_gpus for p in best)
