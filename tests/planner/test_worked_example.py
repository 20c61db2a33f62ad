from __future__ import annotations

import pytest

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.planner.hardware import GPUS
from daskserve.planner.search.algorithms import (
    algorithm_1,
    algorithm_2,
    algorithm_3,
    best_single,
    idle_share,
    join_phases,
)
from daskserve.planner.search.best import cheapest
from daskserve.planner.search.objective import Objective
from daskserve.planner.search.units import Estimate, Scored
from daskserve.planner.worked_example import RATE, SPACE, ClosedForm

EXAMPLE = ClosedForm()


def shape(solution, role):
    group = solution.unit.of_role(role)
    return group.count, group.parallelism


def test_algorithm_1():
    solution = algorithm_1(EXAMPLE, SPACE, RATE)
    assert shape(solution, Role.PREFILL) == (8, Parallelism(tp=1, pp=5))
    assert shape(solution, Role.DECODE) == (4, Parallelism(tp=2, pp=2))
    assert solution.num_gpus == 56
    assert round(EXAMPLE.prefill_rate(Parallelism(1, 5)), 1) == 27.3
    assert round(EXAMPLE.decode_rate(Parallelism(2, 2)), 1) == 50.5


def test_algorithm_2_pairs_one_to_one_and_leaves_decode_idle():
    solution = algorithm_2(EXAMPLE, SPACE, RATE)
    assert (solution.num_units, solution.num_gpus) == (7, 84)
    assert shape(solution, Role.PREFILL) == (1, Parallelism(tp=4, pp=2))
    assert shape(solution, Role.DECODE) == (1, Parallelism(tp=2, pp=2))
    assert round(solution.unit_rate, 1) == 32.2
    assert round(solution.unit_rate / solution.unit.num_gpus, 2) == 2.68
    idle = idle_share(solution.unit, lambda unit: EXAMPLE.evaluate([unit])[0].rate)
    assert round(idle[Role.DECODE], 2) == 0.36 and idle[Role.PREFILL] == 0


def test_tighter_ttft_brings_tensor_parallelism():
    solution = algorithm_1(ClosedForm(slo=SLO(0.18, 0.05)), SPACE, RATE)
    assert shape(solution, Role.PREFILL)[1] == Parallelism(tp=2, pp=5)


def test_best_single_configuration():
    solution = best_single(EXAMPLE, SPACE, RATE)
    assert shape(solution, Role.PREFILL)[1] == Parallelism(tp=2, pp=2)
    assert solution.num_gpus == 60


def test_one_stage_of_tp4_needs_72():
    unit = {
        role: next(
            u
            for u in SPACE.phase_units(EXAMPLE, role)
            if u.groups[0].parallelism == Parallelism(4, 1)
        )
        for role in (Role.PREFILL, Role.DECODE)
    }
    phases = [Scored(unit[r], EXAMPLE.evaluate([unit[r]])[0]) for r in unit]
    assert join_phases("TP4", *phases, RATE).num_gpus == 72


def test_algorithm_3_best_per_gpu_is_not_fewest_in_total():
    fewest = algorithm_3(EXAMPLE, SPACE, RATE)
    assert shape(fewest, Role.PREFILL) == (6, Parallelism(tp=1, pp=2))
    assert shape(fewest, Role.DECODE) == (1, Parallelism(tp=2, pp=2))
    assert (fewest.num_units, fewest.num_gpus) == (4, 64)
    assert (round(fewest.unit_rate, 1), fewest.unit.num_gpus) == (50.5, 16)
    assert round(fewest.unit_rate / 16, 2) == 3.16

    per_gpu = algorithm_3(EXAMPLE, SPACE, RATE, fewest=False)
    assert shape(per_gpu, Role.PREFILL) == (5, Parallelism(tp=1, pp=2))
    assert (round(per_gpu.unit_rate, 1), per_gpu.unit.num_gpus) == (49.6, 14)
    assert round(per_gpu.unit_rate / 14, 2) == 3.55
    assert per_gpu.num_gpus == 70


@pytest.mark.parametrize("rate", [3.0, 47.0, 200.0, 1234.0])
@pytest.mark.parametrize("slo", [SLO(0.25, 0.05), SLO(0.12, 0.03), SLO(2.0, 0.2)])
def test_algorithm_3_is_never_worse_than_algorithm_2(rate, slo):
    example = ClosedForm(slo=slo)
    ours, theirs = algorithm_3(example, SPACE, rate), algorithm_2(example, SPACE, rate)
    assert ours.num_gpus <= theirs.num_gpus
    ours = algorithm_3(example, SPACE, rate, fewest=False)
    best_ours = cheapest(ours.considered, Objective().per_rate)
    assert best_ours.rate_per_gpu >= theirs.unit_rate / theirs.unit.num_gpus


def test_no_configuration_meets_an_slo_below_the_service_time():
    assert algorithm_1(ClosedForm(slo=SLO(0.001, 0.05)), SPACE, RATE) is None
    assert algorithm_2(ClosedForm(slo=SLO(0.25, 0.0001)), SPACE, RATE) is None
    assert algorithm_3(ClosedForm(slo=SLO(0.001, 0.05)), SPACE, RATE) is None
    assert best_single(ClosedForm(slo=SLO(0.001, 0.05)), SPACE, RATE) is None


def test_side_figures():
    example = EXAMPLE
    mfu_s = 2 * example.num_parameters * example.prompt_tokens / example.effective_flops
    assert round(mfu_s, 3) == 0.145
    free_bytes = 2 * example.gpu_bytes - example.weight_bytes
    assert int(free_bytes / (1024 * example.kv_bytes_per_token)) == 59
    kv_bytes = example.prompt_tokens * example.kv_bytes_per_token
    assert round(kv_bytes / 1e6) == 168
    assert round(kv_bytes / GPUS["H100"].link_bandwidth * 1e3, 2) == 0.37
    assert round(kv_bytes / (25e9 / 8) * 1e3) == 54
    assert round(25 * kv_bytes / 1e9, 1) == 4.2
    assert round(GPUS["H100"].ridge_flops_per_byte) == 295


class Bounded(ClosedForm):
    """The example with a bound that is a little loose, counting what gets evaluated."""

    evaluated = 0

    def bound(self, unit):
        return 1.01 * self._rate(unit)

    def evaluate(self, units):
        Bounded.evaluated += len(units)
        return super().evaluate(units)


def test_bounds_prune_without_changing_the_answer():
    everything = len(SPACE.mixed_units(EXAMPLE))
    pruned = algorithm_3(Bounded(), SPACE, RATE)
    assert (pruned.unit, pruned.num_gpus) == (algorithm_3(EXAMPLE, SPACE, RATE).unit, 64)
    assert Bounded.evaluated < everything / 4


def test_estimate_of_nothing_is_infeasible():
    assert Estimate.exactly(0.0).status == "infeasible"
