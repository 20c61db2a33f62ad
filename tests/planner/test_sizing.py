from __future__ import annotations

from dataclasses import replace

import pytest

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.planner.applications import APPLICATIONS, mixed
from daskserve.planner.hardware import Cluster
from daskserve.planner.latency import Roofline
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.search.simulated import Effort, SimulatedEvaluator
from daskserve.planner.search.sized import SizedEvaluator
from daskserve.planner.search.sizing import Demand
from daskserve.planner.search.units import Instances, Unit
from daskserve.planner.slo_classes import SLOClasses
from daskserve.planner.workload import Workload

CLUSTER = Cluster.of("A100", 2)
SPLITS = [
    Parallelism(1, 1),
    Parallelism(2, 1),
    Parallelism(4, 1),
    Parallelism(2, 2),
    Parallelism(1, 4),
]


MIX = {"chatbot-opt-66b": 0.6, "code-opt-66b": 0.1, "summarization-opt-66b": 0.3}


def evaluator(name):
    app = APPLICATIONS[name]
    return evaluator_of(app.model, app.all_lengths(), app.slo)


def evaluator_of(model, lengths, slo):
    sized = SizedEvaluator(ModelSpec.load(model), CLUSTER, Roofline(), Demand.of(lengths, slo))
    effort = Effort((0,), 0.03, 30_000)
    return SimulatedEvaluator(sized, lengths, SLOClasses.of(slo), effort)


def evaluator_of_classes(**targets):
    slo = {name: replace(APPLICATIONS[name].slo, ttft_s=2.0) for name in MIX}
    for name, target in targets.items():
        slo[name] = replace(slo[name], attainment=target)
    return evaluator_of("opt-66b", mixed(MIX), slo)


def check_bounds(both, splits, counts, chunks):
    units = [
        Unit((Instances(role, split, count, "A100"),), chunk_tokens=chunk)
        for role in Role
        for split in splits
        for count in counts
        for chunk in (chunks if role is Role.COLOCATED else (0,))
        if both.fits("A100", split)
    ]
    for unit, estimate in zip(units, both.evaluate(units), strict=True):
        bound = both.sized.bound(unit)
        assert estimate.rate <= bound, unit
        if unit.groups[0].role is not Role.COLOCATED and estimate.rate > 0.3 * bound:
            assert bound <= 2.0 * estimate.rate, unit


def test_bounds_are_above_what_is_simulated():
    splits = [Parallelism(2, 1), Parallelism(1, 4)]
    check_bounds(evaluator("chatbot-opt-13b"), splits, (2,), (0,))


def test_bounds_are_above_what_is_simulated_for_every_class():
    check_bounds(evaluator_of_classes(), [Parallelism(4, 1)], (2,), (0,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chatbot-opt-13b", "code-opt-66b", "summarization-opt-66b"])
def test_bounds_of_every_split(name):
    check_bounds(evaluator(name), SPLITS, (1, 3), (0, 512, 2048))


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_bounds_of_every_split_with_classes(target):
    both = evaluator_of_classes(**{"chatbot-opt-66b": target})
    check_bounds(both, SPLITS, (1, 3), (0, 512, 2048))


def test_a_class_of_single_tokens_does_not_bound_decode():
    lengths = Workload.from_arrays([0.0] * 4, [100] * 4, [1, 1, 200, 200], ["a", "a", "b", "b"])
    slo = {"a": SLO(1.0, 0.001), "b": SLO(1.0, 0.1)}
    assert Demand.of(lengths, slo).pace_s == 0.1
    assert Demand.of(lengths, {**slo, "b": SLO(1.0, 0.0005)}).pace_s == 0.0005


def test_more_instances_serve_more():
    sized = evaluator("chatbot-opt-13b").sized
    for role in Role:
        unit = Unit((Instances(role, Parallelism(2, 1), 1, "A100"),))
        rates = [sized.evaluate([unit.times(n)])[0].rate for n in (1, 2, 4, 8)]
        assert all(b >= 2 * a for a, b in zip(rates, rates[1:], strict=False))
