"""The simulator against the engine's own schedulers, request by request."""

from __future__ import annotations

import numpy as np
import pytest

from daskserve.planner.simulator import Deployment, simulate

LINKS = dict(kv_bytes_per_token=160e3, link_bandwidth=4e9, decode_link_bandwidth=3e9)


@pytest.fixture
def agree(virtual_cluster):
    """Asserts equal times for every request; returns how many prompts were computed again."""

    def check(deployment, trace):
        result = simulate(trace, deployment).timelines
        requests = zip(*(array.tolist() for array in trace.arrays()), strict=True)
        expected = virtual_cluster(deployment).run(requests)
        assert sorted(expected) == list(range(len(trace)))
        column = {
            name: np.array([expected[i][name] for i in range(len(trace))])
            for name in ("prefill", "first", "end", "recomputes")
        }
        arrival_s = result["arrival_s"].values
        started_s = arrival_s + result["prefill_queue_s"]
        first_s = arrival_s + result["ttft_s"]
        end_s = first_s + sum(result[f"{s}_s"] for s in ("kv_transfer", "decode_queue", "decode"))
        np.testing.assert_array_equal(result["num_recomputes"], column["recomputes"])
        np.testing.assert_allclose(started_s, column["prefill"], rtol=0, atol=1e-8)
        np.testing.assert_allclose(first_s, column["first"], rtol=0, atol=1e-8)
        np.testing.assert_allclose(end_s, column["end"], rtol=0, atol=1e-8)
        return int(column["recomputes"].sum())

    return check


def test_disaggregated_with_room(agree, step_times, workload):
    deployment = Deployment.disaggregated(step_times(), 2, step_times(), 2, **LINKS)
    assert agree(deployment, workload(300, 25)) == 0


@pytest.mark.parametrize("seed", range(3))
def test_disaggregated_with_full_pools(agree, step_times, workload, seed):
    small = step_times(kv_capacity_tokens=4000, max_batch=12)
    tiny = step_times(kv_capacity_tokens=2500)
    deployment = Deployment.disaggregated(small, 2, (small, tiny), 2, link_latency_s=1e-3, **LINKS)
    assert agree(deployment, workload(200, 25, seed)) > 0


@pytest.mark.parametrize("capacity", [100_000, 4000])
def test_instances_that_slow_each_other_down(agree, step_times, workload, capacity):
    times = step_times(kv_capacity_tokens=capacity)
    shared = dict(prefill_slowdown=0.15, decode_slowdown=0.3)
    one = Deployment.disaggregated(times, 1, times, 1, link_latency_s=2e-3, **shared, **LINKS)
    assert (agree(one, workload(200, 10)) > 0) == (capacity < 100_000)
    agree(Deployment.disaggregated(times, 2, times, 2, **shared, **LINKS), workload(200, 20))


def test_free_transfers(agree, step_times, workload):
    deployment = Deployment.disaggregated(step_times(), 1, step_times(), 1)
    agree(deployment, workload(100, 8))


@pytest.mark.parametrize("chunk_tokens", [None, 64, 512])
@pytest.mark.parametrize("capacity", [100_000, 3000])
def test_colocated(agree, step_times, workload, chunk_tokens, capacity):
    times = step_times(kv_capacity_tokens=capacity, max_batch=16)
    deployment = Deployment.colocated(times, 2, chunk_tokens)
    recomputes = agree(deployment, workload(200, 12, seed=capacity))
    assert (recomputes > 0) == (capacity < 100_000)


@pytest.mark.parametrize("mode", ["disaggregated", "prefill_first"])
def test_memory_booked_for_the_limit_of_the_caller(agree, step_times, workload, mode):
    times = step_times(kv_capacity_tokens=3000, max_batch=20)
    is_both = mode == "disaggregated"
    prefill = dict(prefill=times, num_prefill=1) if is_both else {}
    deployment = Deployment(mode, decode=times, num_decode=2, max_tokens=300, **prefill)
    assert agree(deployment, workload(150, 8)) == 0


def test_odd_page_sizes(agree, step_times, workload):
    times = step_times(kv_capacity_tokens=3000, max_batch=20)
    for block_size in (1, 7):
        deployment = Deployment.disaggregated(times, 1, times, 2, block_size=block_size, **LINKS)
        agree(deployment, workload(150, 25, seed=block_size))


@pytest.mark.parametrize(("num_stages", "chunk_tokens"), [(2, None), (2, 256), (3, 256)])
def test_pipelines_have_a_step_in_every_stage(
    agree, step_times, workload, num_stages, chunk_tokens
):
    times = step_times(
        num_stages=num_stages, stage_overhead_s=0.002, max_batch=8, prefill_per_prompt_s=0.0
    )
    assert agree(Deployment.colocated(times, 2, chunk_tokens), workload(200, 20)) == 0
