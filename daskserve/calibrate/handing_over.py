"""What lies between the steps: dispatch, KV transfer and hand-over, asked of a service.

One request at a time, as a stream: whatever its timeline holds besides steps is overhead, and
nothing waits for anything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from daskserve.calibrate.grid import Grid
from daskserve.core.kv import blocks_for
from daskserve.core.params import SamplingParams
from daskserve.core.request import Timeline
from daskserve.errors import ConfigError
from daskserve.planner.latency.calibration import Measurement, TransferPoint
from daskserve.service import Service

OUTPUT_TOKENS = 8
_NUM_WARM_UPS = 3
_REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class HandOver:
    """One request that had the service to itself."""

    prompt_tokens: int
    timeline: Timeline


def hand_overs(
    service: Service,
    grid: Grid,
    context_tokens: int,
    on_request: Callable[[int, int], None] = lambda done, of: None,
    seed: int = 0,
) -> list[HandOver]:
    """Send prompts of several lengths through a service, one at a time, in random order.

    Raises
    ------
    ConfigError
        The model's context is too short for two lengths.
    DeadlineExceeded
        A request took minutes.
    """
    lengths = [n for n in grid.hand_over_tokens if n + OUTPUT_TOKENS <= context_tokens]
    if len(lengths) < 2:
        raise ConfigError(f"a context of {context_tokens} tokens is too short for KV transfers")
    rng = np.random.default_rng(seed)
    order = [int(rng.choice(lengths)) for _ in range(_NUM_WARM_UPS)]
    order += rng.permutation(np.repeat(lengths, grid.num_hand_overs)).tolist()
    answers = []
    for number, length in enumerate(order, start=1):
        ids = rng.integers(0, service.tokenizer.vocab_size, length).tolist()
        answers.append(HandOver(length, _alone(service, ids)))
        on_request(number, len(order))
    return answers[_NUM_WARM_UPS:]


def _alone(service: Service, ids: list[int]) -> Timeline:
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    stream = service.stream_request(service.validate(ids, params), timeout_s=_REQUEST_TIMEOUT_S)
    for _ in stream:
        pass
    return asyncio.run(stream.completion()).timeline


def transfers_of(
    answers: Sequence[HandOver], page_bytes: int, block_size: int
) -> list[TransferPoint]:
    """Seconds of a KV pull by its bytes."""
    points = []
    for length in sorted({answer.prompt_tokens for answer in answers}):
        times = [a.timeline.kv_transfer_s for a in answers if a.prompt_tokens == length]
        kv_bytes = blocks_for(length, block_size) * page_bytes
        points.append(TransferPoint(kv_bytes=kv_bytes, **measurement(times).model_dump()))
    return points


def link_of(points: Sequence[TransferPoint]) -> tuple[float, float]:
    """``(latency_s, bytes/s)``: the line with the least squared relative error; the bandwidth is
    infinite where the bytes make no difference."""
    seconds = np.array([point.median_s for point in points])
    kv_bytes = np.array([float(point.kv_bytes) for point in points])
    matrix = np.stack([np.ones_like(kv_bytes), kv_bytes], axis=1) / seconds[:, None]
    scale = matrix.max(axis=0)
    found, _ = nnls(matrix / scale, np.ones(len(points)))
    latency_s, per_byte_s = found / scale
    return float(latency_s), float(1.0 / per_byte_s) if per_byte_s > 0 else float("inf")


def measurement(times_s: Sequence[float]) -> Measurement:
    """Median and interquartile range; a median below 0, of differences, counts as 0."""
    low, middle, high = np.quantile(times_s, (0.25, 0.5, 0.75))
    return Measurement(
        median_s=max(float(middle), 0.0), spread_s=float(high - low), num_repeats=len(times_s)
    )
