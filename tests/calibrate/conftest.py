"""A calibration made up from known coefficients, and a grid that takes no time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from daskserve.calibrate.grid import QUICK, Grid, Point
from daskserve.planner.latency import PaperCoefficients
from daskserve.planner.latency.paper import attention_unit
from daskserve.planner.model_spec import ModelSpec

TINY = replace(
    QUICK,
    num_rounds=3,
    most_prefill_tokens=128,
    most_context_tokens=512,
    prompt_counts=(1, 2, 4),
    prompt_lengths=(16, 32, 64, 100),
    batch_sizes=(1, 2, 4, 8),
    contexts=(16, 32, 64),
    hand_over_tokens=(16, 64),
    num_hand_overs=3,
    service_batches=(1, 4),
    num_service_rows=2,
    traffic_tokens=(16, 64),
    num_traffic_requests=20,
    num_traffic_rounds=2,
)
TRUE = PaperCoefficients(
    2e-12, 3e-11, 0.004, 1.6e-10, 4e-11,
    growth=((1, 0.0), (2, 1e-11), (4, 3e-11), (8, 5e-11), (16, 6e-11), (17, 1.6e-10),
            (32, 3.1e-10)),
    per_prompt=0.002,
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny() -> Grid:
    return TINY


@pytest.fixture(scope="session")
def model() -> ModelSpec:
    return ModelSpec.load("opt-13b")


@pytest.fixture
def true() -> PaperCoefficients:
    return TRUE


@pytest.fixture
def lawful(model):
    """``lawful(noise)``: repeats of the quick grid's steps that follow ``TRUE``."""
    weights, unit = model.num_active_parameters, attention_unit(model)

    def seconds(point: Point) -> float:
        if point.phase == "prefill":
            linear = TRUE.c1 * weights * point.total_tokens + TRUE.c3
            linear += TRUE.per_prompt * point.batch
            return linear + TRUE.c2 * unit * point.batch * point.tokens**2
        base_s = float(TRUE.decode_s_per_weight(np.array(point.batch))) * weights
        return base_s + TRUE.c5 * unit * point.total_tokens

    def make(noise: float = 0.0) -> dict[Point, list[float]]:
        rng = np.random.default_rng(1)
        points = QUICK.points(2048, 64, 10_000, 16)
        return {p: list(seconds(p) * np.exp(rng.normal(0.0, noise, 5))) for p in points}

    return make
