"""What must hold after every event, whatever the deployment and the trace."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daskserve.planner.simulator import Deployment
from daskserve.planner.simulator.compiled import records as r
from daskserve.planner.simulator.driving import Simulation, chunks_of, run_arrays
from daskserve.planner.simulator.result import STAGES

random_laws = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def deployments(draw, make_times):
    """Small pools, few slots, pipelines, slow links: everything that makes requests wait."""

    def times():
        return make_times(
            kv_capacity_tokens=draw(st.sampled_from([1600, 2500, 20_000])),
            max_batch=draw(st.sampled_from([1, 3, 16])),
            num_stages=draw(st.sampled_from([1, 1, 2, 3])),
            stage_overhead_s=draw(st.sampled_from([0.0, 0.001])),
            prefill_budget_tokens=draw(st.sampled_from([100, 1024])),
        )

    num_prefill, num_decode = draw(st.integers(0, 2)), draw(st.integers(1, 2))
    decode = tuple(times() for _ in range(num_decode))
    block_size = draw(st.sampled_from([1, 7, 16]))
    max_tokens = draw(st.sampled_from([None, None, 45]))
    mode = draw(st.sampled_from(["disaggregated", "prefill_first", "chunked"]))
    if mode != "disaggregated":
        chunk = draw(st.sampled_from([16, 200])) if mode == "chunked" else None
        return Deployment(mode, None, 0, decode, num_decode, chunk, block_size=block_size,
                          max_tokens=max_tokens)  # fmt: skip
    prefill = tuple(times() for _ in range(num_prefill)) or None
    return Deployment(
        mode, prefill, num_prefill, decode, num_decode,
        block_size=block_size,
        max_tokens=max_tokens,
        kv_bytes_per_token=draw(st.sampled_from([0.0, 1e5])),
        link_bandwidth=draw(st.sampled_from([1e8, 1e10])),
        link_latency_s=draw(st.sampled_from([0.0, 0.003])),
    )  # fmt: skip


@st.composite
def traces(draw):
    count = draw(st.integers(1, 30))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.01, 0.2]), min_size=count, max_size=count))
    prompts = draw(st.lists(st.integers(1, 1700), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    return np.cumsum(gaps), np.array(prompts), np.array(outputs)


def pages(tokens, block_size):
    return -(-tokens // block_size)


def held_pages(tables, live):
    """(by prefill instances, by instances that decode): pages of each live request."""
    size = tables.world[0].block_size
    state, lane = live["state"], tables.lanes[live["lane"]]
    at_prefill = np.isin(state, (r.PREFILLING, r.READY, r.PULLING))
    at_prefill |= (state == r.WAITING) & (live["has_kv"] == 1)
    at_prefill &= live["prefill"] != r.NOBODY  # decode alone: the KV comes from elsewhere
    context = live["context_offset"] + lane["iteration"]
    covered = live["cover_iteration"] == lane["iteration"]
    covered |= (lane["grown_iteration"] == lane["iteration"]) & (
        live["join_growth"] < lane["growths"]
    )
    tokens = np.where(state == r.RUNNING, context - ~covered, live["num_tokens"])
    at_decode = np.isin(state, (r.PULLING, r.JOINING, r.COMPUTING, r.RUNNING))
    return at_prefill * pages(live["prompt_tokens"], size), at_decode * pages(tokens, size)


def audit(tables):
    """Each live request is somewhere once, and each page has one owner or none."""
    world = tables.world[0]
    live = tables.slots[tables.slots["state"] != r.FREE].view(np.ndarray)
    assert len(live) == world["num_live"] == world["num_arrived"] - world["num_ended"]
    assert len(set(live["request_id"].tolist())) == len(live)
    owners = ("prefill", "instance")
    all_tables = (tables.prefills, tables.instances)
    for owner, table, held in zip(owners, all_tables, held_pages(tables, live), strict=True):
        mine = held > 0
        used = np.zeros(len(table), int)
        np.add.at(used, live[owner][mine], held[mine])
        assert (used + table["free_blocks"] == table["total_blocks"]).all()
        assert (table["free_blocks"] >= 0).all()


@given(st.data())
@settings(random_laws, max_examples=20)
def test_after_every_event(step_times, data):
    deployment = data.draw(deployments(step_times))
    trace = data.draw(traces())
    simulation = Simulation(deployment, chunks_of(*trace))
    ended, last_s = [], 0.0
    for rows in simulation.ended(max_events=1):
        ended += rows["request_id"].tolist()
        assert simulation.now_s >= last_s
        last_s = simulation.now_s
        audit(simulation.tables)
    assert sorted(ended) == list(range(len(trace[0])))
    for table in (simulation.tables.prefills, simulation.tables.instances):
        assert (table.free_blocks == table.total_blocks).all()


@given(st.data())
@random_laws
def test_every_timeline(step_times, data):
    deployment = data.draw(deployments(step_times))
    arrival, prompt, output = data.draw(traces())
    done, simulation = run_arrays(deployment, arrival, prompt, output)
    rejected = done["status"] == r.REJECTED
    size = deployment.block_size
    instances = simulation.tables.instances.total_blocks
    prefills = simulation.tables.prefills.total_blocks
    limit = deployment.max_tokens
    too_long = pages(prompt + (limit or output) - 1, size) > instances.min()
    if len(prefills):
        too_long |= pages(prompt, size) > prefills.min()
    np.testing.assert_array_equal(rejected, too_long)
    if limit:
        output = np.minimum(output, limit)
        assert (done["num_recomputes"] == 0).all()
    stages = np.array([done[name][~rejected] for name in STAGES])
    assert (stages >= 0).all()
    assert (done["decode_s"][~rejected] > 0)[output[~rejected] > 1].all()
    assert (stages.sum(axis=0) + arrival[~rejected] <= simulation.now_s + 1e-9).all()


@given(st.data())
@random_laws
def test_the_same_input_gives_the_same_bytes_however_it_is_fed(step_times, data):
    deployment = data.draw(deployments(step_times))
    trace = data.draw(traces())
    once, _ = run_arrays(deployment, *trace)
    cut = data.draw(st.integers(0, len(trace[0])))
    pieces = [tuple(a[:cut] for a in trace), tuple(a[cut:] for a in trace)]
    again = np.zeros(len(once), r.DONE)
    for rows in Simulation(deployment, pieces).ended(max_events=7):
        again[rows["request_id"]] = rows
    assert once.tobytes() == again.tobytes()


@given(st.data())
@random_laws
def test_no_decision_reads_the_true_output_length(step_times, data):
    """Up to the moment at which a request would have ended, a longer answer changes nothing."""
    deployment = data.draw(deployments(step_times))
    arrival, prompt, output = data.draw(traces())
    # A longer answer must not be one that is refused at the door.
    prompt = np.minimum(prompt, 1000)
    which = data.draw(st.integers(0, len(output) - 1))
    longer = output.copy()
    longer[which] += data.draw(st.integers(1, 300))
    before, _ = run_arrays(deployment, arrival, prompt, output)
    after, _ = run_arrays(deployment, arrival, prompt, longer)
    ends_s = before["arrival_s"] + sum(before[name] for name in STAGES)
    earlier = np.flatnonzero(ends_s < ends_s[which] - 1e-6)
    for name in STAGES:
        np.testing.assert_array_equal(before[name][earlier], after[name][earlier])
