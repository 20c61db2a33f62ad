"""Discrete-event simulator of a deployment, exact at the level of single iterations.

A request's life: it joins the shortest prefill queue, is computed in a token-budget batch,
keeps its KV on the prefill instance until a decode instance has room, is pulled over the links,
and decodes by continuous batching under a paged KV limit. Colocated deployments compute prompts
first or in chunks. Every scheduling decision is the engine's own function, compiled.
"""

from __future__ import annotations

from daskserve.planner.simulator.deployment import Deployment
from daskserve.planner.simulator.driving import run_arrays
from daskserve.planner.simulator.result import SimulationResult, instances_of, timelines_of
from daskserve.planner.simulator.summary import Summary, simulate_stream
from daskserve.planner.workload import Workload

__all__ = ["Deployment", "SimulationResult", "Summary", "simulate", "simulate_stream"]


def simulate(workload: Workload, deployment: Deployment) -> SimulationResult:
    """Every request's timeline.

    An empty workload gives an empty result, whose answers are None. Prefix blocks of the
    workload are not used: every prompt is computed whole.
    """
    done, simulation = run_arrays(deployment, *workload.arrays())
    return SimulationResult(
        timelines=timelines_of(done, workload),
        instances=instances_of(simulation.tables),
        end_s=simulation.now_s,
    )
