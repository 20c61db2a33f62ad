"""Evaluates units by formula: instant, and what prunes the search that simulates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.errors import ModelError
from daskserve.planner.hardware import GPU, Cluster
from daskserve.planner.latency import LatencyModel
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.search.sizing import (
    DECODE_MARGIN,
    PREFILL_MARGIN,
    Demand,
    colocated_rate,
    decode_rate,
    prefill_rate,
)
from daskserve.planner.search.units import Estimate, Instances, Unit
from daskserve.planner.step_times import StepTimes


@dataclass(eq=False)
class SizedEvaluator:
    """Closed-form goodputs of one model, workload and SLO on a cluster.

    ``step_times`` are asked of the latency model once per split and kept; ``reasons`` says why
    splits have none.
    """

    model: ModelSpec
    cluster: Cluster
    latency: LatencyModel
    demand: Demand
    reasons: dict[tuple[str, Parallelism], str] = field(default_factory=dict)
    _times: dict[tuple[str, Parallelism], StepTimes | None] = field(default_factory=dict)
    _rates: dict[tuple[Instances, int], float] = field(default_factory=dict)

    def step_times(self, gpu: str, parallelism: Parallelism) -> StepTimes | None:
        """None when the model cannot be split so, does not fit, or is not known there."""
        key = (gpu, parallelism)
        if key not in self._times:
            try:
                self._times[key] = self.latency.step_times(self.model, self._gpu(gpu), parallelism)
            except ModelError as error:
                self._times[key] = None
                self.reasons[key] = str(error)
        return self._times[key]

    def all_step_times(self) -> list[tuple[tuple[str, Parallelism], StepTimes | None]]:
        """Every split that was asked for so far."""
        return list(self._times.items())

    def _gpu(self, name: str) -> GPU:
        return self.cluster.group_of(name).gpu

    def fits(self, gpu: str, parallelism: Parallelism) -> bool:
        """Whether weights fit and the KV pool could hold the longest request."""
        step = self.step_times(gpu, parallelism)
        return step is not None and step.kv_capacity_tokens >= self.demand.most_tokens

    def bound(self, unit: Unit) -> float:
        """A rate that simulation does not exceed: the formula and a margin."""
        return self._rate(unit, PREFILL_MARGIN, DECODE_MARGIN)

    def evaluate(self, units: Sequence[Unit]) -> list[Estimate]:
        return [Estimate.exactly(self._rate(unit, 1.0, 1.0)) for unit in units]

    def _rate(self, unit: Unit, prefill_margin: float, decode_margin: float) -> float:
        rates = []
        for group in unit.groups:
            step = self.step_times(group.gpu, group.parallelism)
            if step is None:
                return 0.0
            rate = self._group_rate(group, step, unit.chunk_tokens)
            if group.role is Role.COLOCATED:
                rates.append(rate * max(prefill_margin, decode_margin))
            else:
                margin = prefill_margin if group.role is Role.PREFILL else decode_margin
                rates.append(margin * rate)
        return min(rates)

    def _group_rate(self, group: Instances, step: StepTimes, chunk_tokens: int) -> float:
        key = group, chunk_tokens
        if key not in self._rates:
            if group.role is Role.COLOCATED:
                rate = colocated_rate(step, group.count, self.demand, chunk_tokens)
            else:
                formula = prefill_rate if group.role is Role.PREFILL else decode_rate
                rate = formula(step, group.count, self.demand)
            self._rates[key] = rate
        return self._rates[key]
