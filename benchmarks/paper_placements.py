"""Our placements for the paper's three chatbots beside those of its Table 3.

Both are simulated alike, so that a difference in goodput per GPU says what the other choice
costs under our model. OPT-13B and OPT-66B use DistServe's published A100 step times; OPT-175B
has none, so a roofline stands in.

The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.planner.applications import APPLICATIONS, Application
from daskserve.planner.hardware import Cluster
from daskserve.planner.latency import DistServeA100, LatencyModel, Roofline
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.options import evaluator_for
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.search.algorithms import algorithm_3, joint_enumeration
from daskserve.planner.search.best import cheapest
from daskserve.planner.search.objective import Objective
from daskserve.planner.search.units import Instances, Scored, Unit


@dataclass(frozen=True, slots=True)
class Row:
    """A row of Table 3: (TP, PP) of prefill and decode, and the nodes over which it is cut."""

    application: str
    prefill: tuple[int, int]
    decode: tuple[int, int]
    num_segments: int
    latency: LatencyModel

    @property
    def unit(self) -> Unit:
        roles = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        groups = tuple(Instances(role, Parallelism(*split), 1, "A100") for role, split in roles)
        return Unit(groups, self.num_segments)


TABLE_3 = (
    Row("chatbot-opt-13b", (2, 1), (1, 1), 1, DistServeA100()),
    Row("chatbot-opt-66b", (4, 1), (2, 2), 1, DistServeA100()),
    Row("chatbot-opt-175b", (3, 3), (4, 3), 3, Roofline(network_bandwidth=25e9 / 8)),
)


def compare(row: Row, quick: bool) -> dict:
    """Print ours beside the paper's; returns a figure."""
    app = APPLICATIONS[row.application]
    request = _request(app, row.latency, quick)
    evaluator = evaluator_for(request)
    objective = Objective()
    [theirs] = [Scored(row.unit, estimate) for estimate in evaluator.evaluate([row.unit])]
    joint = joint_enumeration(evaluator, request.spaces, 1.0)
    mixed = algorithm_3(evaluator, request.spaces, 1.0, fewest=False)
    ours = cheapest(joint.considered, objective.per_rate)
    ratios = cheapest(mixed.considered, objective.per_rate)
    print(f"{app.name}: TTFT {app.slo.ttft_s:g} s, TPOT {app.slo.tpot_s:g} s, 4 nodes of 8 A100")
    for name, one in (("Table 3", theirs), ("joint", ours), ("Algorithm 3", ratios)):
        answer = evaluator.found[one.unit]
        print(
            f"  {name:12s} {str(one.unit):44s} {one.rate:6.2f} req/s on"
            f" {one.unit.num_gpus:2d} GPUs, {one.rate_per_gpu:.3f} per GPU"
            f" [{one.estimate.low:.2f}, {one.estimate.high:.2f}], ends at {answer.limited_by}"
        )
    print(f"  {explain(theirs, ours, evaluator)}")
    return {
        "name": f"{app.name}_ours_over_table_3",
        "value": float(f"{ours.rate_per_gpu / theirs.rate_per_gpu:.4g}"),
        "unit": "x goodput per GPU",
        "target": 1.0,
        "ok": ours.rate_per_gpu >= 0.99 * theirs.rate_per_gpu,
    }


def explain(theirs: Scored, ours: Scored, evaluator) -> str:
    """Why the choice differs."""
    if ours.unit.groups == theirs.unit.groups:
        return "The same choice as Table 3."
    gain = ours.rate_per_gpu / theirs.rate_per_gpu - 1.0
    parts = [f"Ours gets {gain:+.0%} per GPU."]
    for role in (Role.PREFILL, Role.DECODE):
        mine, other = ours.unit.of_role(role), theirs.unit.of_role(role)
        if mine.parallelism == other.parallelism:
            continue
        alone = [Unit((group,)) for group in (mine, other)]
        rates = [estimate.rate / unit.num_gpus for unit, estimate in
                 zip(alone, evaluator.evaluate(alone), strict=True)]  # fmt: skip
        parts.append(
            f"{role.capitalize()} alone: {mine.parallelism} {rates[0]:.2f} against"
            f" {other.parallelism} {rates[1]:.2f} req/s per GPU."
        )
    slack = [evaluator.evaluate([Unit((g,))])[0].rate for g in theirs.unit.groups]
    parts.append(f"Table 3's phases alone reach {slack[0]:.2f} and {slack[1]:.2f} req/s.")
    return " ".join(parts)


def _request(app: Application, latency: LatencyModel, quick: bool) -> PlanRequest:
    return PlanRequest(
        ModelSpec.load(app.model),
        Cluster.of("A100", 4, network_gbps=25),
        app.all_lengths(),
        app.slo,
        rate=1.0,
        latency=latency,
        seeds=(0,) if quick else (0, 1, 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed")
    options = parser.parse_args()
    figures = []
    for row in TABLE_3:
        started_at = time.process_time()
        figures.append(compare(row, options.quick))
        print(f"  {time.process_time() - started_at:.0f} CPU-s")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
