"""Prefill against queueing theory: one first-come-first-served server is Lindley's recursion."""

from __future__ import annotations

import numpy as np
import pytest

from daskserve.planner.simulator import Deployment
from daskserve.planner.simulator.driving import run_arrays


def one_by_one(step_times, **changes):
    """A prefill instance whose budget never lets two prompts share a batch."""
    return Deployment.prefill_alone(step_times(prefill_budget_tokens=1, **changes), 1)


def waits(deployment, arrival, prompt):
    done, _ = run_arrays(deployment, arrival, prompt, np.ones(len(prompt), int))
    return done["prefill_queue_s"]


def test_waits_follow_lindley_path_by_path(step_times):
    random = np.random.default_rng(3)
    arrival = np.cumsum(random.exponential(0.06, 4000))
    prompt = random.integers(1, 2000, 4000)
    times = step_times()
    service = [times.prefill_s(tokens) for tokens in prompt]
    expected = [0.0]
    for gap, took in zip(np.diff(arrival), service, strict=False):
        expected.append(max(0.0, expected[-1] + took - gap))
    np.testing.assert_allclose(waits(one_by_one(step_times), arrival, prompt), expected, atol=1e-9)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_mean_waits_are_those_of_m_d_1(step_times, load):
    service_s = step_times().prefill_s(512)
    random = np.random.default_rng(1)
    arrival = np.cumsum(random.exponential(service_s / load, 700_000))
    mean = waits(one_by_one(step_times), arrival, np.full(len(arrival), 512)).mean()
    assert mean == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.03)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_mean_waits_are_those_of_m_g_1(step_times, load):
    random = np.random.default_rng(2)
    lengths = np.array([100, 500, 2000])
    times = step_times()
    service_s = np.array([times.prefill_s(tokens) for tokens in lengths])
    shares = np.array([0.5, 0.4, 0.1])
    rate = load / (shares @ service_s)
    arrival = np.cumsum(random.exponential(1 / rate, 700_000))
    prompt = random.choice(lengths, len(arrival), p=shares)
    expected = rate * (shares @ service_s**2) / (2 * (1 - load))
    assert waits(one_by_one(step_times), arrival, prompt).mean() == pytest.approx(
        expected, rel=0.03
    )


def test_a_pipeline_of_unequal_batches_follows_its_recursion(step_times):
    """Stage by stage: a batch enters when it left the stage before and the last batch left it."""
    stages, overhead_s = 3, 0.002
    random = np.random.default_rng(5)
    arrival = np.cumsum(random.exponential(0.05, 2000))
    prompt = random.integers(1, 2000, 2000)
    times = step_times(num_stages=stages, stage_overhead_s=overhead_s)
    deployment = one_by_one(step_times, num_stages=stages, stage_overhead_s=overhead_s)
    done, _ = run_arrays(deployment, arrival, prompt, np.ones(2000, int))
    free_s, ends = [0.0] * stages, [0.0] * stages
    for index in range(2000):
        stage_s = times.stage_s(times.prefill_s(prompt[index]))
        # No more batches in flight than stages.
        now = started = max(arrival[index], free_s[0], ends[-stages])
        for stage in range(stages):
            now = free_s[stage] = max(now, free_s[stage]) + stage_s
        ends.append(now)
        assert done["prefill_queue_s"][index] == pytest.approx(started - arrival[index], abs=1e-9)
        assert done["prefill_s"][index] == pytest.approx(now - started, abs=1e-9)


def test_two_instances_halve_the_load_of_each(step_times):
    times = step_times(prefill_budget_tokens=1)
    random = np.random.default_rng(4)
    arrival = np.cumsum(random.exponential(0.03, 20_000))
    prompt = np.full(len(arrival), 512)
    deployment = Deployment.prefill_alone(times, 2)
    done, _ = run_arrays(deployment, arrival, prompt, np.ones(len(arrival), int))
    counts = np.bincount(done["prefill_instance"])
    assert counts.sum() == len(arrival)
    # The idle first instance gets ties, so it serves more, but not all.
    assert 0.2 < counts[1] / len(arrival) < 0.5
