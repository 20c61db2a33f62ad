"""What whoever watches a service gets to see, from one message to the scheduler."""

from __future__ import annotations

import httpx
import pytest
from distributed import Client, LocalCluster

from daskserve import SamplingParams, Service, run_batch
from daskserve.core.slo import SLO
from daskserve.errors import DaskserveError
from daskserve.observe import JobProgress, Snapshot
from daskserve.service.dask_link import DaskLink

PARAMS = SamplingParams(max_tokens=8)


def test_futures_and_streams_are_counted_where_they_end(service: Service, eventually):
    before: Snapshot = service.observe()
    service.client.gather(service.map(["one prompt"] * 10, PARAMS))
    service.submit("ends with its first token", SamplingParams(max_tokens=1)).result()
    stream = service.stream("another prompt", PARAMS)
    list(stream)
    eventually(lambda: service.observe().cursor >= before.cursor + 12, timeout_s=4.0)
    after = service.observe(before.cursor)
    assert after.num_arrived == before.num_arrived + 12
    assert len(after.finished) == 12 and after.cursor == before.cursor + 12
    assert sorted(one.output_tokens for one in after.finished) == [1] + [8] * 11
    assert all(0 < one.ttft_s < 5 for one in after.finished)
    assert all(before.now < one.arrived_at < one.finished_at < after.now for one in after.finished)
    assert service.observe(after.cursor).finished == ()


def test_every_instance_is_described(service: Service, eventually):
    eventually(lambda: all(one.at > 0 for one in service.observe().instances), timeout_s=4.0)
    snapshot = service.observe()
    assert sorted(one.role for one in snapshot.instances) == ["DECODE", "DECODE", "PREFILL"]
    assert {one.state for one in snapshot.instances} == {"ready"}
    assert all(one.place.name and one.place.host for one in snapshot.instances)
    assert all(one.load.free_kv_blocks > 0 for one in snapshot.instances)
    assert snapshot.model == "mock"


def test_failures_are_counted_and_cancelled_ones_are_not(service: Service, eventually):
    before = service.observe()
    cancelled = service.submit("cancelled", SamplingParams(max_tokens=400))
    eventually(lambda: service.status()["dispatch"]["running"] > 0)
    cancelled.cancel()
    stream = service.stream_request(service.validate("too many wait", PARAMS), max_queue=-1)
    try:
        list(stream)
    except DaskserveError:
        pass
    assert service.observe().num_failed == before.num_failed + 1


def test_jobs_and_decisions_reach_whoever_watches(service: Service, eventually):
    before = service.observe()
    job = JobProgress("job-1", "out.jsonl", 10, 4)
    service.note_job(job)
    eventually(lambda: service.observe().jobs != before.jobs)
    assert service.observe().jobs[-1] == job
    decision = {"decision_id": 1, "reason": "no change, because it is a test"}
    service.client.sync(service._connection.note_decision, decision)
    after = service.observe(before.cursor, before.num_decisions)
    assert after.decisions == (decision,)
    assert service.observe(after.cursor, after.num_decisions).decisions == ()


def test_the_slo_of_a_service_is_told_while_it_is_there(service: Service):
    assert service.observe().slo is None
    limits = SLO(0.2, 0.05)
    with Service.attach(service.client, service.config, slo=limits) as other:
        assert other.observe().slo == limits
    assert service.observe().slo is None


def test_a_batch_job_tells_how_far_it_is(service: Service, tmp_path, eventually):
    summary = run_batch(
        service, ["one", "two", {"prompt": ""}], tmp_path / "told.jsonl", params=PARAMS,
        show_progress=False,
    )  # fmt: skip
    eventually(lambda: any(j.name == "told.jsonl" for j in service.observe().jobs))
    eventually(lambda: service.observe().jobs[-1].state == "done")
    job = service.observe().jobs[-1]
    assert (job.num_rows, job.num_done, job.num_failed) == (3, 3, summary.num_failed)
    assert [row.row for row in job.failed_rows] == [2]


def test_dasks_own_dashboard_links_to_ours():
    with (
        LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0", silence_logs=50) as cluster,
        Client(cluster) as client,
    ):
        link = DaskLink(cluster.scheduler)
        link.start()
        client.sync(client.scheduler.daskserve_note_dashboard, url="http://127.0.0.1:5006/")
        root = cluster.dashboard_link.removesuffix("/status")
        menu = httpx.get(f"{root}/status", timeout=30).text
        assert 'href="daskserve"' in menu
        answer = httpx.get(f"{root}/daskserve")
        assert answer.status_code == 302 and answer.headers["location"] == "http://127.0.0.1:5006/"
        with pytest.raises(ValueError, match="must begin with"):
            client.sync(client.scheduler.daskserve_note_dashboard, url="javascript:alert(1)")
