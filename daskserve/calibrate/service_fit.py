"""What a service adds to the steps, and what instances cost each other, from what they took there.

Everything is put beside lone steps: as they were measured, where prompts of this length and number
were, since what a prompt takes goes up in stairs; else as the fit says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from daskserve.calibrate.grid import Point
from daskserve.calibrate.handing_over import HandOver, measurement
from daskserve.calibrate.in_service import DecodeSteps, PrefillStep
from daskserve.core.placement import Parallelism
from daskserve.planner.latency import CalibratedModel
from daskserve.planner.latency.calibration import Measurement, Overheads, Sharing, Slowdown
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


def overheads_of(
    served: Served,
    latency: CalibratedModel,
    medians_s: Mapping[Point, float],
    kv_latency_s: float,
) -> Overheads:
    """Dispatch and hand-over, and what steps of several sizes take longer than the fit says.

    Steps that come out shorter in a service count as equal.
    """
    step = _times(latency)
    prefill = [
        (a.timeline.prefill_s, _alone_s(step, medians_s, (a.prompt_tokens,))) for a in served.alone
    ]
    prefill_extra, per_token_s = _extra(prefill, [a.prompt_tokens for a in served.alone])
    rows = [row for row in served.decodes if not row.is_beside]
    decode = [(row.step_s, step.decode_s(row.batch, row.context_tokens)) for row in rows]
    decode_extra, per_request_s = _extra(decode, [row.batch for row in rows])
    return Overheads(
        is_colocated=served.is_colocated,
        dispatch=measurement([a.timeline.prefill_queue_s for a in served.alone]),
        hand_over=measurement([a.timeline.decode_queue_s for a in served.apart]),
        prefill_extra=prefill_extra,
        prefill_extra_per_token_s=per_token_s,
        decode_extra=decode_extra,
        decode_extra_per_request_s=per_request_s,
        kv_latency_s=kv_latency_s,
    )


def _extra(
    steps: Sequence[tuple[float, float]], sizes: Sequence[float]
) -> tuple[Measurement, float]:
    """What steps, given as ``(there_s, alone_s)``, take longer: always, and for each of a size.

    The line with the least squared error relative to the steps; its spread is of what is left.
    """
    there_s, alone_s = np.array(steps).T
    size, extra_s = np.array(sizes, float), there_s - alone_s
    matrix = np.stack([np.ones_like(size), size], axis=1) / there_s[:, None]
    scale = matrix.max(axis=0)
    found, _ = nnls(matrix / scale, np.maximum(extra_s / there_s, 0.0))
    base_s, each_s = (found / scale).tolist()
    left = measurement(extra_s - each_s * size)
    return left.model_copy(update={"median_s": base_s}), each_s


def _alone_s(step: StepTimes, medians_s: Mapping[Point, float], lengths: tuple[int, ...]) -> float:
    """Seconds of a prefill step by itself."""
    measured_s = medians_s.get(Point("prefill", len(lengths), lengths[0]))
    if measured_s is not None and len(set(lengths)) == 1:
        return measured_s
    return step.prefill_s(sum(lengths), sum(n**2 for n in lengths), len(lengths))


def sharing_of(
    served: Served, latency: CalibratedModel, medians_s: Mapping[Point, float]
) -> Sharing | None:
    """What steps take longer beside the other role; ``latency`` holds the overheads already."""
    if not served.beside:
        return None
    step, alone = _times(latency), _times(latency.alone())
    extra_s, per_token_s = latency.prefill_extra_s, latency.prefill_extra_per_token_s
    prefill = [
        one.step_s / (_alone_s(alone, medians_s, one.lengths) + added_s) - 1.0
        for one in served.beside
        for added_s in [extra_s + per_token_s * sum(one.lengths)]
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
