"""A day in the simulator: with the replanner, and with every split that stays as it is."""

from __future__ import annotations

from itertools import count

import numpy as np

from daskserve.core.placement import Parallelism
from daskserve.planner.workload import Workload
from daskserve.replanning.outlook import Outlook
from daskserve.replanning.policy import Policy, PolicySettings
from daskserve.replanning.simulated import SimulatedDay, simulate_day
from daskserve.replanning.split import Split
from daskserve.replay.played import Played


def play_static(workload: Workload, outlook: Outlook, split: Split) -> Played:
    """The split stays."""
    times = outlook.step_times[Parallelism()]
    return _played(str(split), simulate_day(workload, times, outlook.slo, split))


def play_replanned(
    workload: Workload,
    outlook: Outlook,
    split: Split,
    settings: PolicySettings | None = None,
    tick_s: float = 1.0,
) -> Played:
    """The policy of production changes it."""
    ids = count(1)
    policy = Policy(outlook, outlook.slo, lambda: next(ids), settings or PolicySettings())
    times = outlook.step_times[Parallelism()]
    return _played("replanning", simulate_day(workload, times, outlook.slo, split, policy, tick_s))


def best_static(workload: Workload, outlook: Outlook, num_instances: int) -> Played:
    """The best of all splits of so many instances, known only afterwards."""
    splits = Split(1, num_instances - 1).same_size()
    days = [play_static(workload, outlook, split) for split in splits]
    return max(days, key=lambda day: day.goodput_rps())


def _played(name: str, day: SimulatedDay) -> Played:
    unknown = np.full(len(day.met), np.nan)
    return Played(
        name, day.arrival_s, day.met, np.zeros(len(day.met), bool), unknown, day.decisions
    )
