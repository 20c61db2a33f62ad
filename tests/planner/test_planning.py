from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.errors import InvalidParameter, WorkloadError
from daskserve.planner.applications import APPLICATIONS
from daskserve.planner.explain import choice_of_algorithm
from daskserve.planner.hardware import GPUS, Cluster, NodeGroup
from daskserve.planner.latency import MemoryBudget, Roofline
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.plan_result import Option
from daskserve.planner.planning import plan, plan_highest_rate
from daskserve.planner.search.algorithms import Solution
from daskserve.planner.search.links import KVTraffic
from daskserve.planner.search.units import Instances, Unit
from daskserve.planner.workload import Workload

MODEL = ModelSpec.load("llama-3.1-8b")
LENGTHS = Workload.from_arrays([0.0] * 3, [200, 500, 900], [40, 100, 20])
QUICK = {"seeds": (0,)}
FREE = Cluster.of("H100", price_per_hour=0.0)


def request(rate=20.0, cluster=None, slo=None, **options):
    cluster = cluster or Cluster.of("H100", 4)
    slo = slo or SLO(0.2, 0.03)
    return PlanRequest(MODEL, cluster, LENGTHS, slo, rate=rate, **{**QUICK, **options})


@pytest.fixture(scope="module")
def found():
    return plan(request())


def test_a_plan_places_explains_and_ranks(found):
    assert found.status == "found"
    usable = [option for option in found.options if option.is_usable]
    assert found.chosen.num_gpus == min(option.num_gpus for option in usable)
    assert found.placement.num_gpus_used == found.chosen.num_gpus
    assert {option.name for option in found.options} == {
        "Algorithm 1, pooled", "colocated", "one parallelism",
    }  # fmt: skip
    text = " ".join(found.explanation)
    for word in ("Algorithm 1", "Runner-up", "TTFT limit x 0.8", "bound by", "other rates"):
        assert word in text
    ranking = found.ranking
    assert ranking.sizes["option"] == 3 and bool(ranking["is_usable"].any())
    assert "<table>" in found._repr_html_() and "colocated" in found._repr_html_()


def test_every_instance_starts_with_its_limits(found):
    for instance in found.placement.instances:
        assert instance.kv_capacity_tokens and instance.max_batch_size
        assert instance.prefill_budget_tokens and instance.gpu_type == "H100"


def test_price_per_million_tokens(found):
    tokens = found.rate * found.tokens_per_request * 3600 / 1e6
    price = found.price_per_million_tokens(found.chosen)
    assert price * tokens == pytest.approx(found.chosen.num_gpus * 3.0)


def test_results_do_not_depend_on_the_executor(found):
    with ThreadPoolExecutor(3) as executor:
        again = plan(request(), executor)
    assert again.explanation == found.explanation
    assert again.ranking.identical(found.ranking)


@pytest.mark.slow
def test_a_slow_network_keeps_kv_inside_nodes():
    cluster = Cluster.of("H100", 8, gpus_per_node=2, network_gbps=1)
    slow = plan(request(rate=150.0, cluster=cluster))
    names = {option.name: option for option in slow.options}
    assert "does not fit in 80%" in names["Algorithm 1, pooled"].rejected
    assert names["Algorithm 3"].is_usable
    assert names["Algorithm 3"].num_gpus <= names["Algorithm 2"].num_gpus
    if slow.chosen.name == "Algorithm 3":
        for instance in slow.placement.of_role(Role.PREFILL):
            assert len(instance.nodes) == 1
    [line] = [line for line in slow.explanation if "(instances anywhere) is out" in line]
    assert str(names["Algorithm 1, pooled"].solution.all_instances) in line


def test_kv_figures_are_those_of_the_instances_they_are_told_of():
    """Of what was chosen, where that ships KV; else of what Algorithm 1 would have."""

    def option(name, num_prefill, traffic):
        groups = (Instances(Role.PREFILL, Parallelism(2, 1), num_prefill, "H100"),
                  Instances(Role.DECODE, Parallelism(2, 1), 2, "H100"))  # fmt: skip
        return Option(name, Solution(name, Unit(groups), 1, 30.0), traffic=traffic)

    six = option("Algorithm 1, pooled", 6, KVTraffic(11.35e9, 1.89e9, 50e9))
    four = option("one parallelism", 4, KVTraffic(11.35e9, 2.84e9, 50e9))
    inside = option("Algorithm 3", 4, None)
    assert "6P(TP2,PP1)" in choice_of_algorithm([six, four], inside)
    line = choice_of_algorithm([four, six], four)
    assert "with 4P(TP2,PP1) + 2D(TP2,PP1) on H100 the busiest node moves 11.35 GB/s" in line
    assert "(2.84 GB/s per prefill instance)" in line


def test_an_unreachable_slo_names_the_nearest():
    answer = plan(request(slo=SLO(0.001, 0.03)))
    assert answer.status == "infeasible" and answer.placement is None
    assert answer.nearest_slo.tpot_s == 0.03 and 0.005 < answer.nearest_slo.ttft_s < 0.2
    assert "nearest SLO" in answer.reason
    assert plan(request(rate=0.5, slo=answer.nearest_slo)).status == "found"


def test_a_small_cluster_says_what_it_can_serve():
    answer = plan(request(rate=5000.0, cluster=Cluster.of("H100", 1, gpus_per_node=2)))
    assert answer.status == "infeasible"
    assert 10 < answer.highest_rate < 5000 and "out of reach" in answer.reason


def test_a_model_that_fits_nowhere():
    big = PlanRequest(
        ModelSpec.load("opt-175b"), Cluster.of("A100", 1, gpus_per_node=2), LENGTHS, SLO(5, 1),
        rate=1.0, **QUICK,
    )  # fmt: skip
    answer = plan(big)
    assert answer.status == "infeasible" and "does not fit on 2 x A100" in answer.reason


def test_one_gpu_serves_both_phases():
    answer = plan(request(rate=2.0, cluster=Cluster.of("H100", 1, gpus_per_node=1)))
    assert answer.chosen.name == "colocated" and answer.chosen.num_gpus == 1


@pytest.mark.slow
def test_highest_rate_grows_with_the_gpus_and_stays_in_budget():
    cluster = Cluster.of("H100", 1, gpus_per_node=4)
    two = plan_highest_rate(request(cluster=cluster), max_gpus=2)
    four = plan_highest_rate(request(cluster=cluster))
    assert two.chosen.num_gpus <= 2 < four.chosen.num_gpus <= 4
    assert four.rate > 1.5 * two.rate
    paid = plan_highest_rate(request(cluster=cluster), max_price_per_hour=6.5)
    assert paid.chosen.price_per_hour <= 6.5
    assert paid.rate == pytest.approx(two.rate)


@pytest.mark.slow
def test_the_highest_rate_is_that_of_many_small_instances_in_one_queue():
    """8 GPUs serve what a plan for that rate needs 8 GPUs for, whichever way is asked."""
    cluster = Cluster.of("H100", 1)
    highest = plan_highest_rate(request(cluster=cluster))
    assert highest.is_highest and highest.chosen.num_gpus == 8
    assert {one.name for one in highest.options} >= {"colocated", "one parallelism"}
    rates = [one.solution.rate for one in highest.options if one.is_usable]
    assert highest.rate == max(rates)
    back = plan(request(rate=0.95 * highest.rate, cluster=cluster))
    assert back.status == "found" and back.chosen.num_gpus <= 8
    beyond = plan(request(rate=1.1 * highest.rate, cluster=cluster))
    assert beyond.status == "infeasible"
    assert beyond.highest_rate == pytest.approx(highest.rate)
    text = " ".join(highest.explanation)
    assert "90 % interval" in text and "it serves" in text and "for the same rate" not in text
    # Each is priced at what it serves itself.
    prices = [highest.price_per_million_tokens(one) * one.solution.rate / one.price_per_hour
              for one in highest.options if one.is_usable]  # fmt: skip
    assert prices == pytest.approx([prices[0]] * len(prices))


@pytest.mark.slow
def test_the_plan_for_the_highest_rate_needs_no_more_gpus():
    cluster = Cluster.of("H100", 1, gpus_per_node=4)
    highest = plan_highest_rate(request(cluster=cluster))
    for_less = plan(request(rate=0.85 * highest.rate, cluster=cluster))
    assert for_less.status == "found" and for_less.chosen.num_gpus <= 4


@pytest.mark.slow
def test_cheaper_gpus_are_taken_for_the_price_objective():
    mixed = Cluster((NodeGroup(GPUS["H100"].priced(9.0), 1, 8), NodeGroup(GPUS["L40S"], 2, 8)))
    by_price = plan(request(cluster=mixed, objective="price", slo=SLO(0.5, 0.05)))
    by_gpus = plan(request(cluster=mixed, slo=SLO(0.5, 0.05)))
    assert by_price.chosen.price_per_hour < by_gpus.chosen.price_per_hour
    assert by_gpus.chosen.num_gpus <= by_price.chosen.num_gpus
    assert {i.gpu_type for i in by_price.placement.instances} == {"L40S"}
    [verdict] = [line for line in by_price.explanation if line.startswith("Disaggregation")]
    assert "$/h" in verdict and "GPUs against" not in verdict
    assert "on L40S" in str(by_price.chosen)


def test_a_smaller_kv_pool_changes_the_plan():
    tight = Roofline(memory=MemoryBudget(kv_share=0.5))
    small = plan(request(rate=2.0, latency=tight, algorithm="colocated"))
    large = plan(request(rate=2.0, algorithm="colocated"))
    limits = [p.placement.instances[0].kv_capacity_tokens for p in (small, large)]
    assert limits[0] == pytest.approx(limits[1] / 2, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["1", "2", "3", "joint", "colocated", "single"])
def test_each_algorithm_alone(algorithm):
    answer = plan(request(algorithm=algorithm, cluster=Cluster.of("H100", 2, gpus_per_node=4)))
    assert answer.status == "found" and len(answer.options) == 1


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_bad_rates(rate):
    with pytest.raises(InvalidParameter, match="rate"):
        request(rate=rate)


def test_no_data():
    assert plan(request(rate=0.0)).status == "no_data"
    assert plan(request(rate=None)).status == "no_data"  # lengths alone have no rate
    empty = Workload.from_arrays([], [], [])
    nothing = PlanRequest(MODEL, Cluster.of("H100"), empty, SLO(1, 1), rate=5.0)
    assert plan(nothing).status == "no_data"
    assert plan_highest_rate(nothing).status == "no_data"


def test_requests_longer_than_the_context_are_named():
    long = Workload.from_arrays([0.0, 1.0], [3000, 5], [5, 5])
    opt = ModelSpec.load("opt-13b")
    with pytest.raises(WorkloadError, match="1 of 2 requests are longer"):
        PlanRequest(opt, Cluster.of("A100"), long, SLO(1, 1))
    assert len(long.within(opt.context_tokens)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "4"}, "algorithm='4' must be one of auto"),
        ({"objective": "love"}, "objective"),
        ({"seeds": ()}, "at least one seed"),
        ({"max_requests": 10}, "at least 30000"),
        ({"nodes_per_instance": 0}, "nodes_per_instance"),
        ({"objective": "price", "cluster": FREE}, "prices above 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InvalidParameter, match=message):
        request(**options)


def test_slo_limits_are_seconds_above_zero():
    for bad in (0, -1, math.nan, math.inf):
        with pytest.raises(InvalidParameter):
            SLO(bad, 0.1)


def test_table_1_presets():
    assert {one.slo.ttft_s for one in APPLICATIONS.values()} == {0.25, 2.5, 4.0, 0.125, 15.0}
    workload = APPLICATIONS["code-opt-66b"].workload(500, 3.0, seed=1)
    assert workload.rate == pytest.approx(3.0)
    assert 150 < workload.arrays()[1].mean() < 200
