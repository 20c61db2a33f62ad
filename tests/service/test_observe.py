"""What whoever watches a service gets to see, from one message to the scheduler."""

from __future__ import annotations

from daskserve import SamplingParams, Service
from daskserve.errors import DaskserveError
from daskserve.observe import Snapshot

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
