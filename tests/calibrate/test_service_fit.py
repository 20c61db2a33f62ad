"""What a service adds to its steps, read out of rows that follow known numbers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from daskserve.calibrate import in_service
from daskserve.calibrate.grid import Point
from daskserve.calibrate.handing_over import HandOver
from daskserve.calibrate.in_service import DecodeSteps
from daskserve.calibrate.service_fit import Served, overheads_of
from daskserve.core.placement import Parallelism
from daskserve.core.request import Timeline
from daskserve.planner.hardware import GPU
from daskserve.planner.latency import CalibratedModel


@pytest.fixture
def latency(model, true):
    hardware = GPU("CPU", 1e12, 1e15, 1e14, 1e9, price_per_hour=0.0)
    return CalibratedModel(model, hardware, true, 512, 64)


@pytest.fixture
def served(latency):
    """Prefill 5 ms and 10 us per token longer; decode 2 ms and 0.5 ms per request."""
    step = latency.step_times(latency.model, latency.hardware, Parallelism())
    answers = [
        HandOver(n, Timeline(0.003, step.prefill_s(n) + 0.005 + 1e-5 * n, 0.01, 0.002, 1.0))
        for n in (32, 128, 512)
    ]
    rows = [
        DecodeSteps(n, 40.0 * n, step.decode_s(n, 40.0 * n) + 0.002 + 0.0005 * n)
        for n in (1, 4, 16)
    ]
    return Served(answers, answers, rows, [], is_colocated=False)


def test_overheads_are_what_the_fit_does_not_explain(served, latency):
    found = overheads_of(served, latency, {}, 0.0007)
    assert found.dispatch.median_s == pytest.approx(0.003)
    assert found.hand_over.median_s == pytest.approx(0.002)
    assert found.prefill_extra.median_s == pytest.approx(0.005)
    assert found.prefill_extra_per_token_s == pytest.approx(1e-5)
    assert found.decode_extra.median_s == pytest.approx(0.002)
    assert found.decode_extra_per_request_s == pytest.approx(0.0005)
    assert found.kv_latency_s == 0.0007


def test_a_lone_step_that_was_measured_counts_more_than_the_fit(served, latency):
    step = latency.step_times(latency.model, latency.hardware, Parallelism())
    stairs = {Point("prefill", 1, n): step.prefill_s(n) + 0.004 for n in (32, 128, 512)}
    found = overheads_of(served, latency, stairs, 0.0)
    assert found.prefill_extra.median_s == pytest.approx(0.001)


def test_steps_that_are_shorter_in_a_service_count_as_equal(served, latency):
    slow = replace(latency, prefill_extra_s=1.0, decode_extra_s=1.0)
    found = overheads_of(served, slow, {}, 0.0)
    assert found.prefill_extra.median_s == found.decode_extra.median_s == 0.0
    assert found.decode_extra_per_request_s == 0.0


class _Lockstep:
    """Stands where requests go: all prompts of a batch are one step, each token takes 10 ms."""

    def __init__(self) -> None:
        self.outputs = []

    async def __call__(self, service, prompt_tokens, output_tokens):
        self.outputs.append(output_tokens)
        number = len(self.outputs)
        await asyncio.sleep(0)
        timeline = Timeline(0.0, 0.1, 0.01 * number, 0.0, 0.01 * (output_tokens - 1))
        return in_service.Answer(prompt_tokens, output_tokens - 1, 0.0, timeline)


def test_a_row_is_that_of_the_request_that_began_last(monkeypatch):
    sent = _Lockstep()
    monkeypatch.setattr(in_service, "_sent", sent)
    (row,) = in_service.decode_steps(None, [4], 1)
    assert sent.outputs == [36, 36, 36, 32]
    assert row.batch == 4
    assert row.step_s == pytest.approx(0.01)
    assert row.context_tokens == 4 * (16 + 1 + 31 / 2)
