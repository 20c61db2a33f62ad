"""The one question that every latency model answers."""

from __future__ import annotations

from typing import Protocol

from daskserve.core.placement import Parallelism
from daskserve.planner.hardware import GPU
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.step_times import StepTimes


class LatencyModel(Protocol):
    """Gives the step times of an instance.

    Raises ModelError when the model cannot be split that way or does not fit, or when the
    latency model knows nothing about it.
    """

    def step_times(self, model: ModelSpec, gpu: GPU, parallelism: Parallelism) -> StepTimes: ...
