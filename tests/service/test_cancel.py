"""Cancelling in every state of a request gives every block back, on both sides."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from distributed import CancelledError

from daskserve import SamplingParams, Service

LONG = SamplingParams(max_tokens=100)
PROMPT = [5] * 50
"""With LONG it takes 10 of the 12 blocks of an instance: one request decodes at a time."""


@pytest.fixture(scope="module")
def tight(attach, mock) -> Iterator[Service]:
    """Room for one long request per instance, two prefills at a time."""
    config = mock(mock_prefill_s=0.05, mock_decode_s=0.02, num_kv_blocks=12)
    with attach(config, slots=2, prefill=1, decode=1) as service:
        yield service


def wait_for_state(service: Service, key: str, *states: str) -> None:
    def state(dask_scheduler) -> str:
        ts = dask_scheduler.tasks.get(key)
        return ts.state if ts is not None else "unknown"

    deadline = time.monotonic() + 5
    while service.client.run_on_scheduler(state) not in states:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_cancelled_while_it_waits_for_a_prefill_instance(tight: Service, is_idle, eventually):
    futures = tight.map([PROMPT] * 6, LONG)
    wait_for_state(tight, tight.prefill_future(futures[-1]).key, "no-worker")
    tight.client.cancel(futures)
    eventually(lambda: is_idle(tight))


def test_cancelled_while_it_prefills(tight: Service, is_idle, eventually):
    future = tight.submit(PROMPT, LONG)
    wait_for_state(tight, tight.prefill_future(future).key, "processing")
    future.cancel()
    eventually(lambda: is_idle(tight))
    assert tight.prefill_future(future).cancelled()


def test_cancelled_while_its_kv_waits(tight: Service, is_idle, eventually):
    running = tight.submit(PROMPT, LONG)
    waiting = tight.submit(PROMPT, LONG)
    wait_for_state(tight, waiting.key, "no-worker")
    waiting.cancel()
    eventually(lambda: sum(c.num_holding for c in tight.load().values()) == 0)
    running.cancel()
    eventually(lambda: is_idle(tight))


def test_cancelled_while_it_decodes(tight: Service, is_idle, eventually):
    future = tight.submit(PROMPT, LONG)
    wait_for_state(tight, future.key, "processing")
    eventually(lambda: sum(c.num_running for c in tight.load().values()) == 1)
    future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    eventually(lambda: is_idle(tight))


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.06, 0.08, 0.1, 0.2])
def test_a_dropped_future_is_a_cancelled_request(tight: Service, is_idle, eventually, delay_s):
    future = tight.submit(PROMPT, LONG)
    time.sleep(delay_s)
    del future
    eventually(lambda: is_idle(tight))


def test_cancelling_twice_and_after_the_end_is_harmless(tight: Service, is_idle, eventually):
    future = tight.submit(PROMPT, SamplingParams(max_tokens=2))
    future.result()
    future.cancel()
    future.cancel()
    eventually(lambda: is_idle(tight))


def test_many_cancelled_at_random_moments(tight: Service, is_idle, eventually):
    futures = tight.map([PROMPT] * 30, LONG)
    for number, future in enumerate(futures):
        time.sleep(0.002 * (number % 7))
        future.cancel()
    del future, futures
    eventually(lambda: is_idle(tight))
    dispatch = tight.status()["dispatch"]
    assert dispatch["violations"] == 0, dispatch["notes"]


def test_a_client_that_goes_away_frees_everything(tight: Service, is_idle, eventually):
    with Service.attach(tight.client.scheduler.address, tight.config) as other:
        futures = other.map([PROMPT] * 4, LONG)
        wait_for_state(tight, futures[0].key, "processing")
        other.client.close()
    eventually(lambda: is_idle(tight))


def test_it_still_works_afterwards(tight: Service, is_idle, eventually):
    answers = tight.client.gather(tight.map([PROMPT] * 4, SamplingParams(max_tokens=20)))
    assert len({a.text for a in answers}) == 1
    eventually(lambda: is_idle(tight))
