"""The step rig against the mock, whose step times are known, and a small real model."""

from __future__ import annotations

import numpy as np
import pytest

from daskserve.calibrate.fitting import fit
from daskserve.calibrate.grid import FULL, QUICK, Point
from daskserve.calibrate.run import model_spec
from daskserve.calibrate.steps import StepRig, measure_steps
from daskserve.core.instance import EngineConfig
from daskserve.errors import ConfigError, ModelError
from daskserve.workers.loading import load_model


def test_the_step_times_of_the_mock_are_recovered(tiny):
    config = EngineConfig(model="mock", num_threads=1, mock_prefill_s=0.012, mock_decode_s=0.006)
    rig = StepRig(config, tiny)
    times = measure_steps(rig, tiny)
    assert {len(values) for values in times.values()} == {tiny.num_rounds}
    model = model_spec(config, rig.shape, rig.page_bytes)
    # The fastest repeat: what else the machine does is not what is tested.
    found = fit(model, {point: min(values) for point, values in times.items()})
    assert 0.0115 <= found.c3 <= 0.0145
    assert 0.0055 <= found.c4 * model.num_active_parameters <= 0.0085


def test_rounds_come_in_other_orders_and_leave_no_pages(tiny):
    rig = StepRig(EngineConfig(model="mock", mock_prefill_s=0.0, mock_decode_s=0.0), tiny)
    seen, real = [], rig.seconds
    rig.seconds = lambda point: seen.append(point) or real(point)
    measure_steps(rig, tiny)
    count = len(rig.points)
    rounds = [seen[start : start + count] for start in range(0, len(seen), count)]
    assert len(rounds) == tiny.num_rounds + 1
    assert all(sorted(one) == sorted(rig.points) for one in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    assert {engine.pool.num_used for engine in rig._engines.values()} == {0}


def test_a_real_model_takes_longer_for_more_tokens(tiny):
    rig = StepRig(EngineConfig("tiny-random-llama", num_threads=1), tiny)
    few, many = Point("prefill", 1, 16), Point("prefill", 8, 64)
    for point in (few, many):
        rig.seconds(point)
    assert min(rig.seconds(few) for _ in range(5)) < min(rig.seconds(many) for _ in range(5))


def test_a_model_that_fails_is_named(tiny):
    class Broken:
        bubble_share, max_open = 0.0, 1

        def __init__(self, runner):
            self.shape, self.dtype, self.bind = runner.shape, runner.dtype, runner.bind

        def begin(self, batch, asked):
            raise RuntimeError("out of order")

    def load(config):
        runner, tokenizer = load_model(config)
        return Broken(runner), tokenizer

    rig = StepRig(EngineConfig(model="mock"), tiny, load)
    with pytest.raises(ModelError, match="RuntimeError: out of order"):
        rig.seconds(rig.points[0])


def test_points_keep_to_context_batch_and_memory():
    points = FULL.points(600, 8, 140, 16)
    assert max(p.tokens for p in points) <= 600 and max(p.batch for p in points) <= 8
    assert max(p.pages(16) for p in points) <= 140
    with pytest.raises(ConfigError, match="only . .* points fit a context of 60 tokens"):
        FULL.points(60, 4, 80, 16)


def test_prompts_in_services_are_measured_as_lone_steps_too():
    for grid in (QUICK, FULL):
        points = grid.points(8192, 64, 10_000, 16)
        for tokens in grid.hand_over_tokens:
            assert Point("prefill", 1, tokens) in points
    assert np.diff(FULL.hand_over_tokens).min() > 0
