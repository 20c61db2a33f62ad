"""What a service adds to the steps, and what instances cost each other, from what they took there.

Everything is put beside what the fit of lone steps says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from daskserve.calibrate.handing_over import HandOver, measurement
from daskserve.calibrate.in_service import DecodeSteps, PrefillStep
from daskserve.core.placement import Parallelism
from daskserve.planner.latency import CalibratedModel
from daskserve.planner.latency.calibration import Overheads, Sharing, Slowdown
from daskserve.planner.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class Served:
    """All that was timed in services.

    Parameters
    ----------
    apart
        Requests that had a prefill and a decode process to themselves.
    alone
        The same for the kind of service that the profile is for: those, or a colocated one.
    decodes
        Decode steps there, alone and beside prompts.
    beside
        Prefill steps beside decodes; empty where the kind has one instance.
    """

    apart: list[HandOver]
    alone: list[HandOver]
    decodes: list[DecodeSteps]
    beside: list[PrefillStep]
    is_colocated: bool


def overheads_of(served: Served, latency: CalibratedModel, kv_latency_s: float) -> Overheads:
    """Dispatch and hand-over, and what steps of several sizes take longer than the fit says.

    Steps that come out shorter in a service count as equal.
    """
    step = _times(latency)
    prefill = [a.timeline.prefill_s - step.prefill_s(a.prompt_tokens) for a in served.alone]
    rows = [row for row in served.decodes if not row.is_beside]
    extra = [row.step_s - step.decode_s(row.batch, row.context_tokens) for row in rows]
    batches = np.array([float(row.batch) for row in rows])
    weight = 1.0 / np.array([row.step_s for row in rows])
    matrix = np.stack([np.ones_like(batches), batches], axis=1) * weight[:, None]
    (base_s, per_request_s), _ = nnls(matrix, np.maximum(extra * weight, 0.0))
    left = np.array(extra) - per_request_s * batches
    return Overheads(
        is_colocated=served.is_colocated,
        dispatch=measurement([a.timeline.prefill_queue_s for a in served.alone]),
        hand_over=measurement([a.timeline.decode_queue_s for a in served.apart]),
        prefill_extra=measurement(prefill),
        decode_extra=measurement(left).model_copy(update={"median_s": float(base_s)}),
        decode_extra_per_request_s=float(per_request_s),
        kv_latency_s=kv_latency_s,
    )


def sharing_of(served: Served, latency: CalibratedModel) -> Sharing | None:
    """What steps take longer beside the other role; ``latency`` holds the overheads already."""
    if not served.beside:
        return None
    step = _times(latency)
    prefill = [
        one.step_s / step.prefill_s(sum(one.lengths), sum(n**2 for n in one.lengths)) - 1.0
        for one in served.beside
    ]
    decode = [
        row.step_s / step.decode_s(row.batch, row.context_tokens) - 1.0
        for row in served.decodes
        if row.is_beside
    ]
    return Sharing(prefill=_slowdown(prefill), decode=_slowdown(decode))


def _times(latency: CalibratedModel) -> StepTimes:
    return latency.step_times(latency.model, latency.hardware, Parallelism())


def _slowdown(shares: Sequence[float]) -> Slowdown:
    low, middle, high = np.quantile(shares, (0.25, 0.5, 0.75))
    return Slowdown(
        median=max(float(middle), 0.0), spread=float(high - low), num_repeats=len(shares)
    )
