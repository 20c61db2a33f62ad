"""Our placements for the paper's three chatbots beside those of its Table 3, and its Figure 11.

Both are simulated alike, so that a difference in goodput per GPU says what the other choice
costs under our model, and both are put to DistServe's own simulator as well. OPT-13B and OPT-66B
use DistServe's published A100 step times; OPT-175B has none, so a roofline stands in.

The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.planner.ablation import ablation
from daskserve.planner.applications import APPLICATIONS, Application
from daskserve.planner.distserve import Disaggregated, model_profile, synthetic_lengths
from daskserve.planner.distserve.configuration import why_not_runnable
from daskserve.planner.distserve.search import SearchSettings, search_goodput
from daskserve.planner.hardware import Cluster
from daskserve.planner.latency import DistServeA100, LatencyModel, Roofline
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.options import evaluator_for
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.search.algorithms import algorithm_3, joint_enumeration
from daskserve.planner.search.best import cheapest
from daskserve.planner.search.objective import Objective
from daskserve.planner.search.simulated import SimulatedEvaluator
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
    for line in explain(theirs, ours, evaluator):
        print(f"  {line}")
    if isinstance(row.latency, DistServeA100):
        print(f"  {original_view(app, theirs.unit, ours.unit)}")
    return {
        "name": f"{app.name}_ours_over_table_3",
        "value": float(f"{ours.rate_per_gpu / theirs.rate_per_gpu:.4g}"),
        "unit": "x goodput per GPU",
        "target": 1.0,
        "ok": ours.rate_per_gpu >= 0.99 * theirs.rate_per_gpu,
    }


def explain(theirs: Scored, ours: Scored, evaluator: SimulatedEvaluator) -> list[str]:
    """Why the choice differs: what the slower phase leaves idle, and what each split serves."""
    if ours.unit.groups == theirs.unit.groups:
        return ["The same choice as Table 3."]
    gain = ours.rate_per_gpu / theirs.rate_per_gpu - 1.0
    lines = [f"Ours gets {gain:+.0%} per GPU."]
    for name, one in (("Table 3", theirs), ("ours", ours)):
        alone = {group.role: _alone(evaluator, group).rate for group in one.unit.groups}
        slow = min(alone, key=lambda role: alone[role])
        fast = max(alone, key=lambda role: alone[role])
        idle = 1.0 - alone[slow] / alone[fast]
        lines.append(
            f"Phases of {name} alone: prefill {alone[Role.PREFILL]:.2f}, decode"
            f" {alone[Role.DECODE]:.2f} req/s; {slow.lower()} ends it and {idle:.0%} of"
            f" {fast.lower()} is idle."
        )
    for role in (Role.PREFILL, Role.DECODE):
        mine, other = ours.unit.of_role(role), theirs.unit.of_role(role)
        if mine.parallelism != other.parallelism:
            rates = [_alone(evaluator, group).rate_per_gpu for group in (mine, other)]
            lines.append(
                f"{role.capitalize()}: {mine.parallelism} serves {rates[0]:.2f} req/s per GPU,"
                f" {other.parallelism} {rates[1]:.2f}."
            )
    return lines


def _alone(evaluator: SimulatedEvaluator, group: Instances) -> Scored:
    unit = Unit((group,))
    return Scored(unit, evaluator.evaluate([unit])[0])


def original_view(app: Application, theirs: Unit, ours: Unit) -> str:
    """Both choices under the original's semantics, with few requests (its default) and many."""
    profile = model_profile(f"facebook/{app.model}")
    lengths = synthetic_lengths(app.lengths)
    parts = []
    for num_requests in (300, 3000):
        settings = SearchSettings(num_requests=num_requests)
        rates = [
            search_goodput(profile, _as_original(unit), lengths, app.slo, settings)
            if not why_not_runnable(profile, _as_original(unit))
            else 0.0
            for unit in (theirs, ours)
        ]
        parts.append(f"{rates[0]:.2f} against {rates[1]:.2f} with {num_requests} requests")
    return f"DistServe's own simulator, req/s per GPU, Table 3 against ours: {', '.join(parts)}."


def _as_original(unit: Unit) -> Disaggregated:
    prefill, decode = (unit.of_role(role).parallelism for role in (Role.PREFILL, Role.DECODE))
    across = max(1, unit.num_segments)
    return Disaggregated(across, prefill.tp, prefill.pp // across, decode.tp, decode.pp // across)


FIGURE_11 = (("chatbot-opt-13b", Parallelism(1)), ("chatbot-opt-66b", Parallelism(4)))
"""Application, and the parallelism of plain vLLM."""


def figure_11(name: str, vllm: Parallelism) -> dict:
    """vLLM, vLLM++, DistServe-Low and High, per GPU: with vLLM's own step times and with ours."""
    app = APPLICATIONS[name]
    # Figure 11 takes links between nodes for granted that carry the KV of DistServe-High.
    fast = Cluster.of("A100", 4, network_gbps=1600)
    request = replace(_request(app, DistServeA100(), quick=True), cluster=fast)
    print(f"{name}, Figure 11, req/s per GPU")
    for label, latency in (("vLLM's step times", DistServeA100("vllm")), ("the same", None)):
        table = ablation(request, vllm, latency).table
        for system in table["system"].values:
            row = table.sel(system=system)
            if latency is not None or system.startswith("vLLM"):
                kind = f"  ({label})" if system.startswith("vLLM") else ""
                rate = float(row["rate_per_gpu"])
                print(f"  {system:15s} {row['instances'].item():42s} {rate:.3f}{kind}")
        if latency is not None:
            rates = dict(zip(table["system"].values, table["rate_per_gpu"].values, strict=True))
    gain = rates["DistServe-High"] / rates["vLLM++"]
    return {
        "name": f"{name}_high_over_vllm++",
        "value": float(f"{gain:.4g}"),
        "unit": "x goodput per GPU",
        "target": 1.0,
        "ok": bool(gain >= 1.0),
    }


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
    figures += [figure_11(*one) for one in FIGURE_11]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
