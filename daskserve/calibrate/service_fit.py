"""What a service adds to its steps, from what they took there.

They are put beside lone steps: as those were measured, where prompts of this length were, since
what a prompt takes goes up in stairs; else as the fit says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from daskserve.calibrate.grid import Point
from daskserve.calibrate.handing_over import HandOver, measurement
from daskserve.calibrate.in_service import Answer, DecodeSteps
from daskserve.core.placement import Parallelism
from daskserve.core.request import Timeline
from daskserve.planner.latency import CalibratedModel
from daskserve.planner.latency.calibration import Measurement, Overheads
from daskserve.planner.simulator.result import STAGES
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
        Decode steps there.
    traffic
        Rounds of mixed requests there.
    """

    apart: list[HandOver]
    alone: list[HandOver]
    decodes: list[DecodeSteps]
    traffic: list[list[Answer]]
    is_colocated: bool

    def at_pace(self, pace: float) -> Served:
        """All times as they were on a machine where they take ``pace`` of what they took."""
        return Served(
            [replace(one, timeline=_slowed(one.timeline, pace)) for one in self.apart],
            [replace(one, timeline=_slowed(one.timeline, pace)) for one in self.alone],
            [replace(one, step_s=one.step_s * pace) for one in self.decodes],
            [[_answer_at(one, pace) for one in answers] for answers in self.traffic],
            self.is_colocated,
        )


def _answer_at(one: Answer, pace: float) -> Answer:
    timeline = _slowed(one.timeline, pace)
    return replace(one, submitted_at=one.submitted_at * pace, timeline=timeline)


def _slowed(timeline: Timeline, pace: float) -> Timeline:
    return replace(timeline, **{name: getattr(timeline, name) * pace for name in STAGES})


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
        (a.timeline.prefill_s, _alone_s(step, medians_s, a.prompt_tokens)) for a in served.alone
    ]
    prefill_extra, per_token_s = _extra(prefill, [a.prompt_tokens for a in served.alone])
    rows = served.decodes
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


def _alone_s(step: StepTimes, medians_s: Mapping[Point, float], tokens: int) -> float:
    """Seconds of a step of one prompt by itself."""
    measured_s = medians_s.get(Point("prefill", 1, tokens))
    return step.prefill_s(tokens) if measured_s is None else measured_s


def _times(latency: CalibratedModel) -> StepTimes:
    return latency.step_times(latency.model, latency.hardware, Parallelism())
