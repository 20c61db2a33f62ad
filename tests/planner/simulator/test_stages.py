"""The five stages of a request in systems small enough to compute by hand."""

from __future__ import annotations

import numpy as np
import pytest

from daskserve.errors import ConfigError
from daskserve.planner.simulator import Deployment
from daskserve.planner.simulator.driving import run_arrays

PROMPT, OUTPUT = 512, 40
KV_BYTES = 1e5
PULL_S = PROMPT * KV_BYTES / 1e9


def run(deployment, *requests):
    arrival, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    return run_arrays(deployment, arrival, prompt, output)[0]


def decode_steps_s(times, prompt, output):
    """Steps of one request that decodes alone: the context grows by one token each."""
    return sum(times.latency_s(times.decode_s(1, prompt + k)) for k in range(1, output))


def test_alone_ttft_is_prefill_and_the_first_gap_is_transfer_and_one_step(step_times):
    times = step_times()
    deployment = Deployment.disaggregated(
        times, 2, times, 2, kv_bytes_per_token=KV_BYTES, link_bandwidth=1e9, link_latency_s=0.01
    )
    done = run(deployment, (0.0, PROMPT, OUTPUT))[0]
    assert done["prefill_queue_s"] == 0
    assert done["prefill_s"] == times.prefill_s(PROMPT)
    assert done["kv_transfer_s"] == pytest.approx(PULL_S + 0.01)
    assert done["decode_queue_s"] == pytest.approx(0, abs=1e-12)
    assert done["decode_s"] == pytest.approx(decode_steps_s(times, PROMPT, OUTPUT))
    two = run(deployment, (0.0, PROMPT, 2))[0]
    gap_s = two["kv_transfer_s"] + two["decode_queue_s"] + two["decode_s"]
    assert gap_s == pytest.approx(PULL_S + 0.01 + times.decode_s(1, PROMPT + 1))


def test_a_prefill_that_begins_as_another_ends_takes_longer(step_times):
    times = step_times(prefill_following_s=0.004, prefill_budget_tokens=PROMPT)
    deployment = Deployment.disaggregated(times, 1, times, 1)
    requests = ((0.0, PROMPT, 2), (0.001, PROMPT, 2), (0.002, PROMPT, 2), (5.0, PROMPT, 2))
    alone_s = times.prefill_s(PROMPT)
    found_s = [done["prefill_s"] for done in run(deployment, *requests)]
    assert found_s == pytest.approx([alone_s, alone_s + 0.004, alone_s + 0.004, alone_s])


@pytest.mark.parametrize("chunk_tokens", [None, 2048])
def test_alone_on_a_colocated_instance(step_times, chunk_tokens):
    times = step_times()
    done = run(Deployment.colocated(times, 1, chunk_tokens), (1.0, PROMPT, OUTPUT))[0]
    assert done["prefill_s"] == pytest.approx(times.prefill_s(PROMPT))
    assert done["kv_transfer_s"] == 0
    assert done["decode_s"] == pytest.approx(decode_steps_s(times, PROMPT, OUTPUT))


def test_a_pipeline_does_not_speed_up_a_lone_request(step_times):
    times = step_times(num_stages=4, stage_overhead_s=0.001)
    done = run(Deployment.disaggregated(times, 1, times, 1), (0.0, PROMPT, OUTPUT))[0]
    assert done["prefill_s"] == pytest.approx(times.latency_s(times.prefill_s(PROMPT)))
    assert done["decode_s"] == pytest.approx(decode_steps_s(times, PROMPT, OUTPUT))


def test_the_longest_micro_batch_sets_the_pace_of_a_pipeline(step_times):
    base_s = np.array([0.0, 0.010, 0.016, 0.020, 0.024])
    times = step_times(
        max_batch=4, num_stages=2, decode_base_s=base_s, decode_per_context_s=np.zeros(5)
    )
    # Three requests in two micro-batches: two of them share one, the third has its own.
    done = run(Deployment.decode_alone(times, 1), *[(0.0, 100, 401)] * 3)
    assert done["decode_s"] == pytest.approx(400 * 2 * base_s[2] / 2, rel=0.01)


def test_a_single_token_ends_with_prefill(step_times):
    times = step_times()
    done = run(Deployment.disaggregated(times, 1, times, 1), (0.0, PROMPT, 1))[0]
    assert done["decode_instance"] == -1
    assert done["kv_transfer_s"] == done["decode_queue_s"] == done["decode_s"] == 0


def test_concurrent_pulls_share_the_link(step_times):
    """Two prompts of one batch are pulled at once, at half the speed each."""
    times = step_times(prefill_budget_tokens=2048)
    deployment = Deployment.disaggregated(
        times, 1, times, 2, kv_bytes_per_token=KV_BYTES, link_bandwidth=1e9
    )
    done = run(deployment, *[(0.0, PROMPT, OUTPUT)] * 2)
    assert set(done["decode_instance"]) == {0, 1}
    assert done["kv_transfer_s"] == pytest.approx(2 * PULL_S)


def test_a_pull_speeds_up_when_another_ends(step_times):
    times = step_times(prefill_budget_tokens=2048)
    deployment = Deployment.disaggregated(
        times, 1, times, 2, kv_bytes_per_token=KV_BYTES, link_bandwidth=1e9
    )
    done = run(deployment, (0.0, 512, OUTPUT), (0.0, 1024, OUTPUT))
    assert done["kv_transfer_s"] == pytest.approx([2 * PULL_S, 3 * PULL_S])


def test_the_slower_link_sets_the_pace(step_times):
    times = step_times()
    deployment = Deployment.disaggregated(
        times, 1, times, 1, kv_bytes_per_token=KV_BYTES, link_bandwidth=1e9,
        decode_link_bandwidth=2.5e8,
    )  # fmt: skip
    assert run(deployment, (0.0, PROMPT, 2))["kv_transfer_s"] == pytest.approx(4 * PULL_S)


def test_a_full_burst_buffer_blocks_prefill(step_times):
    """One prompt fits the prefill instance: the second waits until the first has been pulled."""
    times = step_times()
    small = step_times(kv_capacity_tokens=PROMPT)
    deployment = Deployment.disaggregated(
        small, 1, times, 1, kv_bytes_per_token=KV_BYTES, link_bandwidth=1e8
    )
    done = run(deployment, *[(0.0, PROMPT, OUTPUT)] * 2)
    assert done["prefill_queue_s"][1] == pytest.approx(times.prefill_s(PROMPT) + 10 * PULL_S)


def test_kv_is_pulled_only_when_decode_memory_allows(step_times):
    """Decode memory for one request: the second one's KV stays where it was computed."""
    times = step_times()
    small = step_times(kv_capacity_tokens=PROMPT + OUTPUT + 16)
    done = run(Deployment.disaggregated(times, 1, small, 1), *[(0.0, PROMPT, OUTPUT)] * 2)
    waited_s = done["decode_s"][0] + done["decode_queue_s"][0]
    assert done["decode_queue_s"][1] == pytest.approx(waited_s)


def test_memory_booked_for_a_limit_keeps_others_waiting(step_times):
    """Two requests would fit side by side, but not if both may answer at length."""
    times = step_times(kv_capacity_tokens=2048)
    requests = [(0.0, PROMPT, OUTPUT)] * 2
    used = run(Deployment.decode_alone(times, 1), *requests)
    booked = run(Deployment.decode_alone(times, 1, max_tokens=1000), *requests)
    assert used["decode_queue_s"].tolist() == [0, 0]
    assert booked["decode_queue_s"].tolist() == [0, pytest.approx(booked["decode_s"][0])]
    cut = run(Deployment.decode_alone(times, 1, max_tokens=10), *requests)
    assert cut["output_tokens"].tolist() == [10, 10]


def test_each_instance_has_its_own_capacity(step_times):
    """A request that outgrows the smaller pool is preempted there and only there."""
    small, large = step_times(kv_capacity_tokens=1120), step_times(kv_capacity_tokens=20_000)
    requests = [(0.0, 500, 90)] * 2
    alone = run(Deployment.decode_alone(small, 1), *requests)
    assert alone["num_recomputes"].sum() == 1
    assert run(Deployment.decode_alone(large, 1), *requests)["num_recomputes"].sum() == 0
    mixed = run(Deployment.decode_alone((small, large), 2), *requests)
    assert mixed["num_recomputes"].sum() == 0


def test_a_request_that_no_pool_can_hold_is_rejected_and_the_rest_go_on(step_times):
    times = step_times(kv_capacity_tokens=2000)
    deployment = Deployment.disaggregated(times, 1, times, 1)
    done = run(deployment, (0.0, 1990, 500), (0.0, PROMPT, OUTPUT))
    assert done["status"].tolist() == [1, 0]
    assert np.isnan(done["prefill_s"][0]) and done["decode_s"][1] > 0


def test_a_prefill_beside_a_decode_step_takes_longer_and_so_does_the_step(step_times):
    """The second prompt is computed while the first decodes, all of its time."""
    times = step_times(prefill_budget_tokens=PROMPT)
    deployment = Deployment.disaggregated(
        times, 1, times, 1, prefill_slowdown=0.25, decode_slowdown=0.5
    )
    done = run(deployment, *[(0.0, PROMPT, 400)] * 2)
    first, second = done
    assert first["prefill_s"] == pytest.approx(times.prefill_s(PROMPT))
    assert second["prefill_s"] == pytest.approx(1.25 * times.prefill_s(PROMPT))
    alone = run(Deployment.decode_alone(times, 1), (0.0, PROMPT, 400))[0]["decode_s"]
    overlap_s = second["prefill_s"]
    joined_s = decode_steps_s(times, PROMPT, 400)
    assert alone == pytest.approx(joined_s)
    lone = run(deployment, (0.0, PROMPT, 400), (0.0, PROMPT, 1))[0]
    # A third of the overlap is lost: it computes at two thirds of its pace.
    assert lone["decode_s"] == pytest.approx(alone + overlap_s / 3)


def test_a_prompt_that_decoding_joins_late_is_slowed_for_the_rest(step_times):
    """Decoding begins in the middle of a prefill, which goes on at the slower pace."""
    times = step_times()
    deployment = Deployment.disaggregated(
        times, 1, times, 1, prefill_slowdown=0.5, link_latency_s=0.02
    )
    done = run(deployment, (0.0, PROMPT, 400), (0.001, 1024, 1))
    prefill_s = times.prefill_s(1024)
    assert done["prefill_s"][1] == pytest.approx(0.02 + 1.5 * (prefill_s - 0.02))


def test_an_idle_neighbour_slows_nothing(step_times):
    times = step_times()
    links = dict(kv_bytes_per_token=KV_BYTES, link_bandwidth=1e9)
    requests = (0.0, PROMPT, OUTPUT), (5.0, PROMPT, OUTPUT)
    alone = run(Deployment.disaggregated(times, 1, times, 1, **links), *requests)
    shared = Deployment.disaggregated(
        times, 1, times, 1, prefill_slowdown=0.5, decode_slowdown=0.5, **links
    )
    assert run(shared, *requests).tolist() == alone.tolist()


@pytest.mark.parametrize("given", [dict(prefill_slowdown=-0.1), dict(decode_slowdown=np.inf)])
def test_a_slowdown_must_be_a_share(step_times, given):
    with pytest.raises(ConfigError, match=f"{next(iter(given))}=.* must be at least 0"):
        Deployment.disaggregated(step_times(), 1, step_times(), 1, **given)
