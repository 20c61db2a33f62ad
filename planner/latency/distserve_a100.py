"""DistServe's published A100 coefficients as a latency model: OPT-13B and OPT-66B."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError, ModelError
from daskserve.planner.distserve.profile import ModelProfile, StepCoefficients, model_profile
from daskserve.planner.hardware import GPU
from daskserve.planner.latency.guard import at_least_physical
from daskserve.planner.latency.roofline import prefill_knots
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.step_times import StepTimes, saturating_tokens

MS = 1e-3
STAGE_OVERHEAD_MS = 1.0
"""The original adds this many milliseconds times PP to every prefill stage."""


@dataclass(frozen=True, slots=True)
class DistServeA100:
    """Step times and KV capacities as published, for ``opt-13b`` and ``opt-66b`` on A100.

    Any other model or GPU is a ConfigError: it is the wrong source, not a split that does not fit.

    Parameters
    ----------
    backend
        ``distserve`` (its own engine) or ``vllm``.
    """

    backend: str = "distserve"
    max_batch_size: int = 1024

    def step_times(self, model: ModelSpec, gpu: GPU, parallelism: Parallelism) -> StepTimes:
        if gpu.name != "A100":
            raise ConfigError(f"the published step times are of the A100, not of {gpu.name}")
        profile, row = self._row(model, parallelism)
        capacity = profile.kv_capacity_tokens.get((parallelism.tp, parallelism.pp))
        if capacity is None:
            raise ModelError(f"{model.name} does not run as {parallelism} in the published data")
        knots = prefill_knots(model.context_tokens)
        a, b, c = (value * MS for value in row.prefill)
        linear = a + b * knots + STAGE_OVERHEAD_MS * MS * parallelism.pp**2
        base, per_context = _decode_arrays(row, self.max_batch_size)
        step = StepTimes(
            prefill_knots_tokens=knots,
            prefill_knots_s=linear,
            prefill_quadratic_s=max(c, 0.0),
            decode_base_s=base,
            decode_per_context_s=per_context,
            num_stages=parallelism.pp,
            kv_capacity_tokens=capacity,
            prefill_budget_tokens=saturating_tokens(knots, linear),
        )
        return at_least_physical(step, model, gpu, parallelism)

    def _row(
        self, model: ModelSpec, parallelism: Parallelism
    ) -> tuple[ModelProfile, StepCoefficients]:
        profile = model_profile(f"facebook/{model.name}")
        if not any(profile.coefficients.values()):
            raise ConfigError(f"no step times of {model.name} are published, its KV capacity only")
        rows = profile.coefficients.get(self.backend)
        if rows is None:
            known = ", ".join(profile.coefficients)
            raise ConfigError(f"backend {self.backend!r} is not published; there are {known}")
        if parallelism.tp not in rows:
            known = ", ".join(str(tp) for tp in sorted(rows))
            raise ModelError(
                f"no profile of {model.name} at TP={parallelism.tp}; there are {known}"
            )
        return profile, rows[parallelism.tp]


def _decode_arrays(row: StepCoefficients, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Base and per-context seconds; the formula counts every context plus one."""
    batch = np.arange(largest + 1, dtype=np.float64)
    small = batch < row.large_batch_from
    a, b, c = (
        np.where(small, low, high) * MS
        for low, high in zip(row.decode_small, row.decode_large, strict=True)
    )
    base = a + (b + c) * batch
    base[0] = 0.0
    return base, b
