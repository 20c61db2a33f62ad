"""How a service replans: what is asked for, and the replanner that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from daskserve.core.instance import DEFAULT_BUDGET_TOKENS, EngineConfig, InstanceInfo, Role
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.errors import ConfigError
from daskserve.planner.latency.calibration import read_calibration
from daskserve.planner.latency.mock import mock_step_times
from daskserve.replanning.outlook import Outlook
from daskserve.replanning.policy import PolicySettings


@dataclass(frozen=True, slots=True)
class ReplanOptions:
    """Parameters
    ----------
    is_dry_run
        Decisions are made and written down, nothing is changed.
    decisions
        File of the journal, see `daskserve.replanning.record`; None keeps it in memory.
    latency
        A ``profile.json`` of ``daskserve calibrate``; the mock needs none.
    max_instances
        On an own cluster, up to so many may be started; None starts and stops none.
    measure_s
        After a change, what came of it is measured for so long.
    """

    is_dry_run: bool = False
    decisions: str | Path | None = None
    latency: str | Path | None = None
    max_instances: int | None = None
    measure_s: float = 30.0
    interval_s: float = 0.5
    policy: PolicySettings = field(default_factory=PolicySettings)


def outlook_of(
    config: EngineConfig, slo: SLO | None, options: ReplanOptions, instances: Sequence[InstanceInfo]
) -> Outlook:
    """The planner for running instances.

    Raises
    ------
    ConfigError
        No SLO; no profile, or one that is of something else.
    """
    if slo is None:
        raise ConfigError("replanning needs the limits to plan for: --slo-ttft and --slo-tpot")
    apart = [one for one in instances if one.role is not Role.COLOCATED]
    if len(apart) < len(instances) or len(apart) < 3:
        raise ConfigError(
            "replanning needs at least three prefill and decode instances in all: with fewer there"
            " is no other split"
        )
    capacity = min(one.num_kv_blocks * one.block_size for one in apart)
    if config.model == "mock":
        budget = config.prefill_budget_tokens or DEFAULT_BUDGET_TOKENS
        return Outlook({Parallelism(): mock_step_times(config, capacity, budget)}, slo)
    if options.latency is None:
        raise ConfigError(
            "replanning needs the step times of the model here: run daskserve calibrate -o"
            " profile.json and give --latency profile.json"
        )
    found = read_calibration(options.latency)
    latency = found.latency()
    times = latency.step_times(found.model, latency.hardware, Parallelism())
    times = times.limited_to(
        kv_capacity_tokens=min(capacity, times.kv_capacity_tokens),
        max_batch_size=min(config.max_batch_size, times.max_batch_size),
    )
    return Outlook(
        {Parallelism(): times},
        latency.less_dispatch(slo),
        kv_bytes_per_token=found.model.kv_bytes_per_token,
        link_bandwidth=latency.hardware.link_bandwidth,
        link_latency_s=latency.hand_over_s,
        **latency.beside,
    )
