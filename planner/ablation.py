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
from daskserve.planner.search.algorithms import algorithm_1, algorithm_2
from daskserve.planner.search.best import cheapest, evaluate_best
from daskserve.planner.search.objective import Objective
from daskserve.planner.search.simulated import Executor, SimulatedEvaluator
from daskserve.planner.search.units import Instances, Unit
from daskserve.planner.simulator import Deployment

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
        Its rate decides how many instances of each phase DistServe-High has.
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
    low = algorithm_2(ours, request.spaces, request.asked_rate)
    high = algorithm_1(ours, request.spaces, request.asked_rate)
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


def _best_colocated(request: PlanRequest, evaluator: SimulatedEvaluator) -> Unit | None:
    units = [
        unit for space in request.spaces for unit in space.phase_units(evaluator, Role.COLOCATED)
    ]
    cost = Objective().per_rate
    best = cheapest(evaluate_best(evaluator, units, [cost]), cost)
    return best.unit if best else None
