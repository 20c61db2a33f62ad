"""The original's placement search: every pair of degrees, a bisection of the rate for each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np

from daskserve.core.slo import SLO
from daskserve.errors import ConfigError
from daskserve.planner.distserve.configuration import (
    Colocated,
    Configuration,
    Disaggregated,
    why_not_runnable,
)
from daskserve.planner.distserve.lengths import draw_arrivals_ms, draw_lengths
from daskserve.planner.distserve.profile import ModelProfile
from daskserve.planner.distserve.simulation import simulate_arrays


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How the original bisects.

    Parameters
    ----------
    max_rate_per_gpu
        Upper end in requests/s per GPU. It is never tried itself, so a goodput close to it
        says only that there is at least so much.
    resolution
        The bisection stops when the interval is no wider than this.
    num_requests, seed
        One trace for every probe. 300 requests flatter a queue that is not stationary.
    """

    max_rate_per_gpu: float = 5.0
    resolution: float = 0.25
    num_requests: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_rate_per_gpu", "resolution"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}={value!r} must be a finite number above 0")


@dataclass(frozen=True, slots=True)
class JointSearch:
    """What a search found.

    Parameters
    ----------
    goodput_per_gpu
        Requests/s per GPU of every configuration that runs, in the order of enumeration.
    not_runnable
        The others, with the reason.
    """

    goodput_per_gpu: dict[Configuration, float]
    not_runnable: dict[Configuration, str]

    @property
    def best(self) -> list[Configuration]:
        """The configurations that tie for the most goodput per GPU, then for the fewest GPUs.

        Empty when none reached any rate. The original reports whichever of them finished first.
        """
        top = max(self.goodput_per_gpu.values(), default=0.0)
        if top == 0:
            return []
        leaders = [name for name, rate in self.goodput_per_gpu.items() if rate == top]
        fewest = min(leader.num_gpus for leader in leaders)
        return [leader for leader in leaders if leader.num_gpus == fewest]


def joint_configurations(
    profile: ModelProfile, num_nodes: int, gpus_per_node: int, *, high_affinity: bool
) -> list[Configuration]:
    """Every disaggregated configuration that the original enumerates for a cluster.

    Parameters
    ----------
    high_affinity
        True: instances may lie anywhere. False: a segment of both phases shares a node, and
        ``pp_cross`` segments form the instances.
    """
    total = num_nodes * gpus_per_node
    within = total if high_affinity else gpus_per_node
    tensor = [tp for tp in profile.tensor_degrees if tp <= within]
    pipeline = [pp for pp in profile.pipeline_degrees if pp <= within]
    across = [1] if high_affinity else [pp for pp in profile.pipeline_degrees if pp <= num_nodes]
    found: list[Configuration] = []
    for degrees in product(across, tensor, pipeline, tensor, pipeline):
        configuration = Disaggregated(*degrees)
        if configuration.num_gpus > min(total, configuration.pp_cross * within):
            continue
        stages = {configuration.prefill[1], configuration.decode[1]}
        if stages <= set(profile.pipeline_degrees):
            found.append(configuration)
    return found


def colocated_configurations(profile: ModelProfile, num_gpus: int) -> list[Configuration]:
    """Every colocated configuration that the original enumerates for a number of GPUs."""
    degrees = product(profile.tensor_degrees, profile.pipeline_degrees)
    return [Colocated(tp, pp) for tp, pp in degrees if tp * pp <= num_gpus]


def search_goodput(
    profile: ModelProfile,
    configuration: Configuration,
    lengths: np.ndarray,
    slo: SLO,
    settings: SearchSettings | None = None,
) -> float:
    """Highest rate per GPU, in requests/s, that the bisection finds to pass; 0 if none does.

    Parameters
    ----------
    lengths
        Rows of (prompt, output) tokens to draw requests from.
    slo
        ``attainment`` is the percentile that each metric must meet alone.
    """
    settings = settings or SearchSettings()
    prompt_tokens, output_tokens = draw_lengths(lengths, settings.num_requests, settings.seed)
    low, high = 0.0, float(settings.max_rate_per_gpu)
    while high - low > settings.resolution:
        middle = (low + high) / 2
        arrival_ms = draw_arrivals_ms(
            settings.num_requests, middle * configuration.num_gpus, settings.seed
        )
        latencies = simulate_arrays(
            profile, configuration, arrival_ms, prompt_tokens, output_tokens
        )
        if latencies.passes(slo):
            low = middle
        else:
            high = middle
    return low


def joint_search(
    profile: ModelProfile,
    configurations: Iterable[Configuration],
    lengths: np.ndarray,
    slo: SLO,
    settings: SearchSettings | None = None,
) -> JointSearch:
    """Searches the goodput of every configuration and says which cannot run, and why."""
    goodput: dict[Configuration, float] = {}
    not_runnable: dict[Configuration, str] = {}
    for configuration in configurations:
        reason = why_not_runnable(profile, configuration)
        if reason:
            not_runnable[configuration] = reason
        else:
            goodput[configuration] = search_goodput(profile, configuration, lengths, slo, settings)
    return JointSearch(goodput, not_runnable)
