"""Engines that keep several steps open, as a pipeline does: what is in one is left alone."""

from __future__ import annotations

import pytest

from daskserve.core.instance import Role
from daskserve.core.request import Completion
from daskserve.errors import EngineStepFailed, RequestCancelled

BLOCK = 4


@pytest.fixture
def engine(make_engine):
    return make_engine(Role.COLOCATED, max_open=2, block_size=BLOCK, prefill_budget_tokens=8)


@pytest.fixture
def solo(rig_type, make_engine):
    def answer(request) -> tuple[int, ...]:
        rig = rig_type(make_engine(Role.COLOCATED, block_size=BLOCK))
        rig.submit(request)
        return rig.run()[request.request_id].token_ids

    return answer


def open_two(rig, make_request, max_tokens=12) -> list:
    """Two requests that decode in an open step each."""
    requests = [make_request(name, 6, max_tokens=max_tokens) for name in "ab"]
    for request in requests:
        rig.submit(request)
    engine = rig.entry
    while engine.scheduler.num_running < 2:
        rig.step()
    while len(engine.open_steps) < 2:
        engine.begin(engine.schedule())
    return requests


def test_steps_end_in_the_order_in_which_they_began_and_share_no_request(
    rig_type, engine, make_request
):
    begun, ended = [], []
    begin, finish = engine.open_steps.begin, engine.open_steps.finish

    def noting_begin(step, **kwargs):
        begun.append(step)
        open_now = begun[len(ended) :]
        rows = [sequence for step in open_now for sequence in step.sequences]
        assert len(rows) == len(set(map(id, rows))), "a request is in one open step at most"
        assert len(open_now) <= 2
        begin(step, **kwargs)

    def noting_finish():
        ended.append(finish())
        return ended[-1]

    engine.open_steps.begin, engine.open_steps.finish = noting_begin, noting_finish
    rig = rig_type(engine)
    for number in range(7):
        rig.submit(make_request(f"r{number}", 5, max_tokens=9))
    assert all(isinstance(answer, Completion) for answer in rig.run().values())
    assert [step for step, _ in ended] == begun


def test_nothing_is_scheduled_while_all_steps_are_open(rig_type, engine, make_request):
    rig = rig_type(engine)
    open_two(rig, make_request)
    rig.submit(make_request("c", 5, max_tokens=3))
    assert engine.schedule() is None and engine.load.num_waiting == 1
    engine.conclude(*engine.finish())
    assert engine.schedule() is not None


def test_a_request_aborted_in_an_open_step_ends_at_once_and_its_token_is_dropped(
    rig_type, engine, make_request, solo
):
    rig = rig_type(engine)
    _, kept = open_two(rig, make_request)
    used = rig.used_blocks()
    rig.abort("a")
    assert isinstance(rig.outcomes["a"][0], RequestCancelled)
    assert rig.used_blocks() < used
    again = make_request("a", 7, max_tokens=5)  # into the pages that were freed
    rig.submit(again)
    answers = rig.run()
    assert [len(rig.outcomes[name]) for name in "ab"] == [2, 1]
    assert answers["a"].token_ids == solo(again)
    assert answers["b"].token_ids == solo(kept)
    assert rig.used_blocks() == 0


def test_a_step_that_fails_takes_the_other_open_one_not_along(rig_type, engine, make_request, solo):
    forward, rows = engine.runner.forward, []

    def fails_once(batch):
        rows.append(batch.num_rows)
        engine.runner.forward = forward
        raise RuntimeError("boom")

    rig = rig_type(engine)
    _, kept = open_two(rig, make_request)
    engine.conclude(*engine.finish())
    engine.runner.forward = fails_once
    answers = rig.run()
    assert rows == [1]
    assert isinstance(answers["a"], EngineStepFailed)
    assert answers["b"].token_ids == solo(kept)


def test_everything_may_end_while_steps_are_open(rig_type, engine, make_request):
    rig = rig_type(engine)
    open_two(rig, make_request)
    engine.abort_all(EngineStepFailed("over"))
    rig.run()
    assert {type(outcome) for outcomes in rig.outcomes.values() for outcome in outcomes} == {
        EngineStepFailed
    }
    assert rig.used_blocks() == 0 and len(engine.open_steps) == 0


def test_what_is_in_an_open_step_is_not_preempted(rig_type, make_engine, make_request, solo):
    engine = make_engine(
        Role.COLOCATED, max_open=2, block_size=BLOCK, num_kv_blocks=12, max_batch_size=6
    )
    preempt = engine.scheduler._preempt

    def checked(sequence):
        assert not sequence.wave.is_open
        preempt(sequence)

    engine.scheduler._preempt = checked
    rig = rig_type(engine)
    requests = [make_request(f"r{number}", 5, max_tokens=25) for number in range(6)]
    for request in requests:
        rig.submit(request)
    answers = rig.run()
    assert sum(answer.timeline.num_recomputes for answer in answers.values()) > 0
    assert [answers[r.request_id].token_ids for r in requests] == [solo(r) for r in requests]


def test_requests_to_decode_are_spread_over_the_open_steps(rig_type, make_engine, make_request):
    shared = dict(block_size=BLOCK)
    decode = make_engine(Role.DECODE, max_open=3, max_batch_size=6, **shared)
    rig = rig_type(make_engine(Role.PREFILL, **shared), decode)
    for number in range(6):
        rig.submit(make_request(f"r{number}", 5, max_tokens=30))
    for _ in range(12):
        rig.step()
    while not decode.open_steps.is_full:
        decode.begin(decode.schedule())
    sizes = []
    while len(decode.open_steps):
        step, computed = decode.finish()
        decode.conclude(step, computed)
        sizes.append(len(computed.sequences))
    assert sizes == [2, 2, 2]
