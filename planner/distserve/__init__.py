"""DistServe's published simulator, event for event: the yardstick that other simulators lack.

Kept apart from our own simulator on purpose. It knows no transfer time, no KV limit and no joint
attainment, and a short horizon flatters it; it exists so that results can be compared with those
that DistServe printed, request by request.
"""

from daskserve.planner.distserve.configuration import Colocated, Configuration, Disaggregated
from daskserve.planner.distserve.latencies import RequestLatencies
from daskserve.planner.distserve.lengths import SYNTHETIC_LENGTHS, draw_lengths, synthetic_lengths
from daskserve.planner.distserve.profile import ModelProfile, StepCoefficients, model_profile
from daskserve.planner.distserve.search import (
    JointSearch,
    SearchSettings,
    colocated_configurations,
    joint_configurations,
    joint_search,
    search_goodput,
)
from daskserve.planner.distserve.simulation import simulate

__all__ = [
    "SYNTHETIC_LENGTHS",
    "Colocated",
    "Configuration",
    "Disaggregated",
    "JointSearch",
    "ModelProfile",
    "RequestLatencies",
    "SearchSettings",
    "StepCoefficients",
    "colocated_configurations",
    "draw_lengths",
    "joint_configurations",
    "joint_search",
    "model_profile",
    "search_goodput",
    "simulate",
    "synthetic_lengths",
]
