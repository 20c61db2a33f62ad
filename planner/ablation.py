"""What each idea of DistServe is worth (its Figure 11): colocation, disaggregation, the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import xarray as xr

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.errors import ModelError
from daskserve.planner.goodput import Goodput
from daskserve.planner.latency import LatencyModel
from daskserve.planner.options import evaluator_for
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.search.algorithms import (
    Solution,
    algorithm_1,
    algorithm_2,
    join_phases,
)
from daskserve.planner.search.best import cheapest, evaluate_best
from daskserve.planner.search.objective import Objective
from daskserve.planner.search.simulated import Executor, SimulatedEvaluator
from daskserve.planner.search.units import Instances, Scored, Unit
from daskserve.planner.simulator import Deployment

MOST_INSTANCES = 4
SYSTEMS = ("vLLM", "vLLM++", "DistServe-Low", "DistServe-High")


@dataclass(frozen=True, eq=False)
class Ablation:
    """Four systems, each at the goodput of its own best arrangement.

    Parameters
    ----------
    units
        Instances by system; one that meets the SLO nowhere is missing.
    deployments
        The same for `sweep`, whose ``num_gpus`` is the property of that name.
    goodputs
        Measured on the unit as a whole.
    """

    units: Mapping[str, Unit]
    deployments: Mapping[str, Deployment] = field(repr=False)
    goodputs: Mapping[str, Goodput] = field(repr=False)

    @property
    def num_gpus(self) -> dict[str, int]:
        return {name: unit.num_gpus for name, unit in self.units.items()}

    @property
    def table(self) -> xr.Dataset:
        """By dimension ``system``: instances, GPUs and requests/s per GPU with its interval."""
        names = list(self.units)
        found = [self.goodputs[name] for name in names]
        gpus = np.array([self.units[name].num_gpus for name in names])
        rates = {
            "rate_per_gpu": [one.rate for one in found],
            "low_per_gpu": [one.low for one in found],
            "high_per_gpu": [one.high for one in found],
        }
        columns = {
            name: ("system", np.array(values, float) / gpus) for name, values in rates.items()
        }
        instances = ("system", [str(self.units[name]) for name in names])
        return xr.Dataset(
            {"instances": instances, "num_gpus": ("system", gpus)} | columns, {"system": names}
        )

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def ablation(
    request: PlanRequest,
    vllm: Parallelism,
    vllm_latency: LatencyModel | None = None,
    executor: Executor | None = None,
) -> Ablation:
    """Goodput per GPU of vLLM, vLLM++, DistServe-Low and DistServe-High.

    Parameters
    ----------
    request
        Its rate does not matter: each system is taken at the size that suits it best.
    vllm
        The parallelism of plain vLLM, which the paper takes from vLLM's own evaluation. vLLM++ is
        the same engine with the best parallelism; both compute whole prompts first.
    vllm_latency
        Step times of vLLM's engine; None takes those of the request, so that only the placement
        differs.

    Raises
    ------
    ModelError
        The model cannot run as ``vllm`` says.
    """
    ours = evaluator_for(request, executor)
    theirs = evaluator_for(replace(request, latency=vllm_latency or request.latency), executor)
    gpu = request.spaces[0].gpu
    if not theirs.fits(gpu, vllm):
        raise ModelError(f"{request.model.name} cannot run as {vllm} on {gpu}")
    low = algorithm_2(ours, request.spaces, 1.0)
    high = _balanced(request, ours)
    plain = Unit((Instances(Role.COLOCATED, vllm, 1, gpu),))
    found = {
        "vLLM": (theirs, plain),
        "vLLM++": (theirs, _best_colocated(request, theirs)),
        "DistServe-Low": (ours, low.unit if low else None),
        "DistServe-High": (ours, high.unit if high else None),
    }
    there = {name: (by, unit) for name, (by, unit) in found.items() if unit is not None}
    for by, unit in there.values():
        by.evaluate([unit])
    return Ablation(
        units={name: unit for name, (_, unit) in there.items()},
        deployments={name: by.deployment(unit) for name, (by, unit) in there.items()},
        goodputs={name: by.found[unit] for name, (by, unit) in there.items()},
    )


def _balanced(request: PlanRequest, evaluator: SimulatedEvaluator) -> Solution | None:
    """Algorithm 1's splits in the counts that leave the least idle."""
    once = algorithm_1(evaluator, request.spaces, 1.0)
    if once is None:
        return None
    alone = [Unit((replace(group, count=1),)) for group in once.unit.groups]
    phases = [Scored(unit, evaluator.evaluate([unit])[0]) for unit in alone]
    fits = [
        join_phases(once.algorithm, phases[0], phases[1], count * one.rate)
        for one in phases
        for count in range(1, MOST_INSTANCES + 1)
    ]
    return max(fits, key=lambda solution: solution.rate / solution.num_gpus)


def _best_colocated(request: PlanRequest, evaluator: SimulatedEvaluator) -> Unit | None:
    units = [
        unit for space in request.spaces for unit in space.phase_units(evaluator, Role.COLOCATED)
    ]
    cost = Objective().per_rate
    best = cheapest(evaluate_best(evaluator, units, [cost]), cost)
    return best.unit if best else None
