"""Streams on a cluster: shared with futures, given up in every state, never in each other's way."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

import dask
import pytest
from distributed import Client

from daskserve import SamplingParams, Service
from daskserve.core.instance import Role
from daskserve.errors import (
    ClusterError,
    DeadlineExceeded,
    InstanceLost,
    Overloaded,
    RequestCancelled,
)

LONG = SamplingParams(max_tokens=100)
PROMPT = [5] * 50
"""With LONG it takes 10 of the 12 blocks of an instance: one request decodes at a time."""


def counters(service: Service, role: Role) -> dict[str, int]:
    return service.status()["dispatch"]["roles"][role.value]


def text_of(stream) -> str:
    return "".join(delta.text for delta in stream)


@pytest.fixture(scope="module")
def tight(attach, mock) -> Iterator[Service]:
    """Room for one long request per instance, two prefills at a time."""
    config = mock(mock_prefill_s=0.05, mock_decode_s=0.02, num_kv_blocks=12)
    with attach(config, slots=2, prefill=1, decode=1) as service:
        yield service


async def test_the_completion_is_that_of_a_future(service: Service):
    params = SamplingParams(max_tokens=20)
    expected = await asyncio.to_thread(service.submit("hello", params).result)
    stream = service.stream_request(service.validate("hello", params))
    completion = await stream.completion()  # though nobody reads the stream
    assert (completion.text, completion.token_ids) == (expected.text, expected.token_ids)
    assert completion.finish_reason == "length" and completion.num_prompt_tokens == 4
    assert completion.ttft_s > 0 and completion.tpot_s > 0.001
    assert "".join([d.text async for d in stream]) == expected.text


def test_colocated_instances_stream(colocated: Service):
    expected = colocated.submit("hello", SamplingParams(max_tokens=20)).result().text
    assert text_of(colocated.stream("hello", SamplingParams(max_tokens=20))) == expected


def test_one_token_needs_no_decode_instance(service: Service, eventually, is_idle):
    assert len(list(service.stream("hello", SamplingParams(max_tokens=1)))) == 1
    eventually(lambda: is_idle(service))


def test_log_probabilities_come_with_every_token(service: Service):
    params = SamplingParams(max_tokens=10, logprobs=2)
    stream = service.stream("hello", params)
    deltas = list(stream)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    completion = service.submit("hello", params).result()
    assert completion.logprobs == tuple(entries) and len(entries) == 10
    ids = [i for delta in deltas for i in delta.token_ids]
    # The mock's choice is greedy: the likeliest token is the one sampled.
    assert [e.top[0] for e in entries] == [
        (i, e.logprob) for i, e in zip(ids, entries, strict=True)
    ]
    assert all(e.top[0][1] >= e.top[1][1] and len(e.top) == 2 for e in entries)
    assert service.stream("hello", SamplingParams(max_tokens=2)).__next__().logprobs is None


# Given up, in every state.


def test_closed_while_it_waits_for_a_prefill_instance(tight: Service, is_idle, eventually):
    streams = [tight.stream(PROMPT, LONG) for _ in range(6)]
    eventually(lambda: counters(tight, Role.PREFILL)["waiting"] > 0)
    for stream in streams:
        stream.close()
    eventually(lambda: is_idle(tight))


def test_closed_while_it_prefills(tight: Service, is_idle, eventually):
    stream = tight.stream(PROMPT, LONG)
    eventually(lambda: counters(tight, Role.PREFILL)["running"] == 1)
    stream.close()
    eventually(lambda: is_idle(tight))


def test_closed_while_its_kv_waits(tight: Service, is_idle, eventually):
    running = tight.stream(PROMPT, LONG)
    waiting = tight.stream(PROMPT, LONG)
    eventually(lambda: counters(tight, Role.DECODE)["waiting"] == 1)
    assert counters(tight, Role.PREFILL)["held"] == 1
    assert tight.status()["dispatch"]["holding"] > 0  # covered by the renewal of leases
    waiting.close()
    eventually(lambda: sum(c.num_holding for c in tight.load().values()) == 0)
    running.close()
    eventually(lambda: is_idle(tight))


async def test_closed_while_it_decodes(tight: Service, is_idle, eventually):
    stream = tight.stream(PROMPT, LONG)
    await anext(stream)
    await anext(stream)
    await stream.aclose()
    with pytest.raises(RequestCancelled):
        await stream.completion()
    await asyncio.to_thread(eventually, lambda: is_idle(tight))


def test_closed_while_its_kv_is_pulled(attach, mock, is_idle, eventually, monkeypatch):
    from daskserve.service.instance_plugin import InstancePlugin

    pulling = []

    async def slow_pull(self, handle, destination) -> None:
        pulling.append(handle)
        await asyncio.sleep(30)

    monkeypatch.setattr(InstancePlugin, "pull", slow_pull)
    with attach(mock(), prefill=1, decode=1) as service:
        stream = service.stream(PROMPT, LONG)
        eventually(lambda: bool(pulling))
        stream.close()
        eventually(lambda: is_idle(service))


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.08, 0.15])
def test_after_the_deadline_nothing_is_left(tight: Service, is_idle, eventually, delay_s: float):
    stream = tight.stream_request(tight.validate(PROMPT, LONG), timeout_s=delay_s)
    with pytest.raises(DeadlineExceeded):
        list(stream)
    eventually(lambda: is_idle(tight))


def test_many_closed_at_random_moments(tight: Service, is_idle, eventually):
    rng = random.Random(0)
    streams = [tight.stream(PROMPT, LONG) for _ in range(40)]
    futures = tight.map([PROMPT] * 10, SamplingParams(max_tokens=2))
    for stream in streams:
        time.sleep(rng.random() * 0.02)
        stream.close()
    assert all(future.result().num_output_tokens == 2 for future in futures)
    eventually(lambda: is_idle(tight))
    dispatch = tight.status()["dispatch"]
    assert dispatch["violations"] == 0, dispatch["notes"]


def test_a_service_whose_links_break_frees_everything(tight: Service, is_idle, eventually):
    with Service.attach(tight.client.scheduler.address, tight.config) as other:
        streams = [other.stream(PROMPT, LONG) for _ in range(4)]
        next(streams[0])
        other.client.sync(_cut, other)
        eventually(lambda: is_idle(tight))
        with pytest.raises(ClusterError):
            list(streams[0])
        # The next one makes new links.
        assert len(list(other.stream(PROMPT, SamplingParams(max_tokens=2)))) == 2


async def _cut(service: Service) -> None:
    online = service._online
    for link in (online._scheduler, *online._instances.values()):
        link.cut()


def test_closing_a_service_ends_its_streams(tight: Service, is_idle, eventually):
    with Service.attach(tight.client.scheduler.address, tight.config) as other:
        stream = other.stream(PROMPT, LONG)
        next(stream)
    with pytest.raises(RequestCancelled):
        list(stream)
    eventually(lambda: is_idle(tight))
    with pytest.raises(ClusterError, match="closed"):
        list(other.stream(PROMPT, LONG))


# Beside each other.


def test_two_services_and_futures_share_the_instances(service: Service, is_idle, eventually):
    params = SamplingParams(max_tokens=15)
    prompts = [f"prompt {i} " * (1 + i % 4) for i in range(24)]
    expected = [c.text for c in service.client.gather(service.map(prompts, params))]
    with Service.attach(service.client.scheduler.address, service.config) as other:
        streams = [(other, service)[i % 2].stream(p, params) for i, p in enumerate(prompts)]
        futures = service.map(prompts, params)
        assert [text_of(stream) for stream in streams] == expected
        assert [future.result().text for future in futures] == expected
    eventually(lambda: is_idle(service))
    dispatch = service.status()["dispatch"]
    assert dispatch["choices"] > 96 and dispatch["violations"] == 0, dispatch["notes"]


def test_whoever_does_not_read_delays_nobody(service: Service):
    unread = [service.stream("hello", SamplingParams(max_tokens=200)) for _ in range(10)]
    started_at = time.monotonic()
    assert len(list(service.stream("hello", SamplingParams(max_tokens=20)))) == 20
    assert time.monotonic() - started_at < 2
    assert all(len(text_of(stream)) == 200 for stream in unread)


def test_a_full_queue_refuses_early(attach, mock, is_idle, eventually):
    config = mock(mock_prefill_s=0.2, num_kv_blocks=100)
    with (
        dask.config.set({"daskserve.service.max-waiting-requests": 4}),
        attach(config, slots=2, prefill=1, decode=1) as service,
    ):
        params = SamplingParams(max_tokens=2)
        streams = [service.stream([5] * 400, params) for _ in range(12)]
        started_at = time.monotonic()
        with pytest.raises(Overloaded, match="wait for PREFILL") as caught:
            list(streams[-1])
        assert time.monotonic() - started_at < 0.4, "it waited for those before"
        assert caught.value.retry_after_s >= 1
        assert [len(list(stream)) for stream in streams[:5]] == [2] * 5
        eventually(lambda: is_idle(service))


# Instances that go.


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_streams_go_on_exactly_when_an_instance_leaves(cluster, mock, colocated, role: Role):
    params = SamplingParams(max_tokens=40)
    prompts = [f"prompt {i}" for i in range(6)]
    expected = [c.text for c in colocated.client.gather(colocated.map(prompts, params))]
    config = mock(mock_decode_s=0.01, mock_prefill_s=0.03, num_kv_blocks=200)
    with (
        cluster(prefill=2, decode=2) as own,
        Client(own) as client,
        Service.attach(client, config) as service,
    ):
        streams = [service.stream(prompt, params) for prompt in prompts]
        texts = [next(stream).text for stream in streams]
        gone = next(i.address for i in service.info() if i.role is role)
        client.retire_workers([gone], close_workers=True, remove=True)
        texts = [t + text_of(s) for t, s in zip(texts, streams, strict=True)]
        assert texts == expected


@pytest.mark.slow
def test_without_an_instance_streams_fail_with_the_reason(cluster, mock):
    with (
        dask.config.set({"daskserve.service.no-instance-timeout-s": 0.3}),
        cluster(prefill=1, decode=1) as own,
        Client(own) as client,
        Service.attach(client, mock(mock_decode_s=0.02)) as service,
    ):
        stream = service.stream("hello", LONG)
        next(stream)
        gone = next(i.address for i in service.info() if i.role is Role.DECODE)
        client.retire_workers([gone], close_workers=True, remove=True)
        with pytest.raises(ClusterError, match="no DECODE instance for 0.3 s"):
            list(stream)


@pytest.mark.slow
def test_an_instance_that_cannot_be_reached_is_left_for_another(
    cluster, mock, monkeypatch, eventually, is_idle
):
    monkeypatch.setattr("daskserve.service.online_call._GRACE_S", 0.05)
    with (
        cluster(prefill=2, decode=1) as own,
        Client(own) as client,
        Service.attach(client, mock(num_kv_blocks=200)) as service,
    ):
        first, second = (i.address for i in service.info() if i.role is Role.PREFILL)
        _close_door(client, first)
        streams = [service.stream(f"prompt {i}", SamplingParams(max_tokens=5)) for i in range(4)]
        assert [len(text_of(stream)) for stream in streams] == [5] * 4
        _close_door(client, second)
        with pytest.raises(InstanceLost, match="no PREFILL instance could be reached"):
            list(service.stream("hello", SamplingParams(max_tokens=5)))
        eventually(lambda: is_idle(service))


def _close_door(client: Client, address: str) -> None:
    async def refuse(comm) -> None:
        comm.abort()

    def close(dask_worker) -> None:
        plugin = dask_worker.plugins["daskserve-instance"]
        plugin._online.close()
        dask_worker.handlers["daskserve_online"] = refuse

    client.run(close, workers=[address])


def test_status_says_what_every_role_does(tight: Service, is_idle, eventually):
    eventually(lambda: is_idle(tight))
    stream = tight.stream(PROMPT, LONG)
    next(stream)
    eventually(lambda: counters(tight, Role.DECODE)["running"] == 1)
    decode = counters(tight, Role.DECODE)
    assert decode == {
        "ready": 1,
        "accepting": 1,
        "draining": 0,
        "waiting": 0,
        "waiting_prompt_tokens": 0,
        "running": 1,
        "slots": 2,
        "held": 0,
        "held_kv_blocks": 0,
        "used_kv_blocks": 10,
        "total_kv_blocks": 12,
    }
    assert counters(tight, Role.PREFILL)["ready"] == 1
    assert counters(tight, Role.COLOCATED)["ready"] == 0
    stream.close()
    eventually(lambda: is_idle(tight))
