"""Instances that are drained: nothing new, what they have ends, no request is lost."""

from __future__ import annotations

import pytest

from daskserve import SamplingParams, Service
from daskserve.core.instance import Role
from daskserve.errors import InvalidParameter

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


def addresses(service: Service, role: Role) -> list[str]:
    return [i.address for i in service.info() if i.role is role]


@pytest.fixture(scope="module")
def pair(attach, mock):
    """Two instances of each role."""
    with attach(mock(num_kv_blocks=200), prefill=2, decode=2) as service:
        yield service


def test_a_drained_instance_finishes_its_requests_and_others_take_the_new_ones(
    pair: Service, eventually
):
    leaving, staying = addresses(pair, Role.DECODE)
    prefill = addresses(pair, Role.PREFILL)[0]
    running = pair.map(["the first of many"] * 12, PARAMS)
    eventually(lambda: pair.load()[leaving].num_running > 0)
    assert pair.drain([leaving, prefill])[leaving] is False
    later = pair.map(["those that come later"] * 12, PARAMS)
    eventually(lambda: all(pair.drain([leaving, prefill]).values()), timeout_s=10)
    done_when_drained = pair.load()[leaving].num_finished
    more = pair.map(["and more of them"] * 12, PARAMS)
    completions = pair.client.gather([*running, *later, *more])
    assert all(len(c.token_ids) == 40 for c in completions)
    assert pair.load()[leaving].num_finished == done_when_drained > 0
    states = {i["address"]: i["is_draining"] for i in pair.status()["instances"]}
    assert states[leaving] and states[prefill] and not states[staying]
    for instance in (leaving, prefill):
        pair.resume(instance)
    pair.client.gather(pair.map(["they are back"] * 12, PARAMS))
    assert pair.load()[leaving].num_finished > done_when_drained


def test_streams_go_past_a_drained_instance(pair: Service):
    leaving = addresses(pair, Role.DECODE)[0]
    stream = pair.stream("a stream from before", PARAMS)
    next(stream)
    pair.drain([leaving])
    before = pair.load()[leaving].num_finished
    texts = [delta.text for delta in stream]
    assert texts
    for _ in range(3):
        assert "".join(delta.text for delta in pair.stream("a stream from later", PARAMS))
    assert pair.load()[leaving].num_finished <= before + 1
    pair.resume(leaving)


def test_an_instance_that_is_gone_is_drained_and_cannot_be_resumed(pair: Service):
    assert pair.drain(["tcp://127.0.0.1:1"]) == {"tcp://127.0.0.1:1": True}
    with pytest.raises(InvalidParameter, match="must be one that is ready"):
        pair.resume("tcp://127.0.0.1:1")


def test_nothing_is_wrong_with_the_books(pair: Service):
    dispatch = pair.status()["dispatch"]
    assert dispatch["violations"] == 0, dispatch["notes"]
