from __future__ import annotations

import pytest

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.planner.applications import APPLICATIONS
from daskserve.planner.hardware import Cluster
from daskserve.planner.latency import Roofline
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.search.simulated import Effort, SimulatedEvaluator
from daskserve.planner.search.sized import SizedEvaluator
from daskserve.planner.search.sizing import Demand
from daskserve.planner.search.units import Instances, Unit

CLUSTER = Cluster.of("A100", 2)
SPLITS = [
    Parallelism(1, 1),
    Parallelism(2, 1),
    Parallelism(4, 1),
    Parallelism(2, 2),
    Parallelism(1, 4),
]


def evaluator(name):
    app = APPLICATIONS[name]
    lengths = app.all_lengths()
    sized = SizedEvaluator(
        ModelSpec.load(app.model), CLUSTER, Roofline(), Demand.of(lengths, app.slo)
    )
    return SimulatedEvaluator(sized, lengths, app.slo, Effort((0,), 0.03, 30_000))


def check_bounds(name, splits, counts, chunks):
    both = evaluator(name)
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
    check_bounds("chatbot-opt-13b", [Parallelism(2, 1), Parallelism(1, 4)], (2,), (0,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chatbot-opt-13b", "code-opt-66b", "summarization-opt-66b"])
def test_bounds_of_every_split(name):
    check_bounds(name, SPLITS, (1, 3), (0, 512, 2048))


def test_more_instances_serve_more():
    sized = evaluator("chatbot-opt-13b").sized
    for role in Role:
        unit = Unit((Instances(role, Parallelism(2, 1), 1, "A100"),))
        rates = [sized.evaluate([unit.times(n)])[0].rate for n in (1, 2, 4, 8)]
        assert all(b >= 2 * a for a, b in zip(rates, rates[1:], strict=False))
