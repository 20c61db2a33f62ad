"""Step times of the mock model: fixed, whatever a step holds."""

from __future__ import annotations

import numpy as np

from daskserve.core.instance import EngineConfig
from daskserve.planner.step_times import StepTimes

_FAR_TOKENS = 1e6
_LEAST_S = 1e-6  # a mock without times would be a division by zero


def mock_step_times(
    config: EngineConfig, kv_capacity_tokens: int, prefill_budget_tokens: int
) -> StepTimes:
    """What an instance of the mock with this configuration takes.

    Parameters
    ----------
    kv_capacity_tokens
        Of its pool.
    prefill_budget_tokens
        L_m.
    """
    prefill_s, decode_s = (
        max(seconds, _LEAST_S) for seconds in (config.mock_prefill_s, config.mock_decode_s)
    )
    batches = config.max_batch_size
    return StepTimes(
        prefill_knots_tokens=np.array([0, _FAR_TOKENS]),
        prefill_knots_s=np.array([prefill_s, prefill_s]),
        prefill_quadratic_s=0.0,
        decode_base_s=np.array([0.0, *[decode_s] * batches]),
        decode_per_context_s=np.zeros(batches + 1),
        kv_capacity_tokens=kv_capacity_tokens,
        prefill_budget_tokens=prefill_budget_tokens,
        max_batch_size=batches,
    )
