from __future__ import annotations

import random

import pytest

from daskserve import SLO
from daskserve.core.request import Timeline
from daskserve.server.slo_bound import SloBound


def finish(bound, tpot_s, step_s, ttft_s=0.1):
    """An answer of eleven tokens; what is more than its steps it waited for a slot."""
    waited_s = 10 * (tpot_s - step_s) + step_s
    timeline = Timeline(0.0, ttft_s, 0.0, waited_s, 10 * step_s)
    bound.finished(ttft_s, tpot_s, 10, timeline)


def test_a_fresh_bound_takes_as_many_as_it_has_slots():
    bound = SloBound(SLO(ttft_s=1.0, tpot_s=0.1), num_slots=20)
    assert bound.allows(20, 0) and bound.allows(1, 19)
    assert not bound.allows(1, 20)


@pytest.mark.parametrize(
    ("step_s", "most"), [(0.1, 16), (0.0625, 25), (0.05, 32), (0.01, 32), (1.0, 16)]
)
def test_slack_in_tpot_becomes_a_queue(step_s, most):
    bound = SloBound(SLO(ttft_s=10.0, tpot_s=0.1), num_slots=20)
    for _ in range(200):
        finish(bound, step_s, step_s)
    assert bound.max_in_flight == most


def test_prompts_wait_only_as_many_as_get_their_token_in_time():
    """One first token each 0.1 s: eight of them fit into nine tenths of the limit."""
    bound = SloBound(SLO(ttft_s=0.9, tpot_s=0.1), num_slots=100)
    bound.began(200, 0.0)
    for number in range(1, 201):
        bound.first_token(0.1 * number)
    assert 8 < bound.max_waiting < 8.2
    bound.began(7, 30.0)
    assert bound.allows(1, 7) and not bound.allows(2, 7)


def test_idle_time_between_prompts_does_not_count():
    bound = SloBound(SLO(ttft_s=1.0, tpot_s=0.1), num_slots=100)
    for number in range(100):
        bound.began(1, 100.0 * number)
        bound.first_token(100.0 * number + 0.2)
    assert bound.max_waiting == pytest.approx(4.5)


def test_an_idle_server_takes_anybody():
    """Whatever was seen, else it would never learn that it has become faster."""
    bound = SloBound(SLO(ttft_s=0.001, tpot_s=0.001), num_slots=1)
    bound.began(1, 0.0)
    bound.first_token(50.0)
    finish(bound, 50.0, 40.0)
    assert bound.allows(1, 0) and not bound.allows(1, 1)


def test_those_who_leave_make_room():
    bound = SloBound(SLO(ttft_s=1.0, tpot_s=0.1), num_slots=100)
    bound.began(1, 0.0)
    bound.first_token(0.5)
    bound.began(1, 1.0)
    assert not bound.allows(1, 1)
    bound.gave_up(1, 2.0)
    assert bound.allows(1, 1)


def test_late_answers_lower_the_bound_until_few_enough_are_late():
    """A server where answers are the later the more are in flight beyond 20."""
    chance = random.Random(0)
    bound = SloBound(SLO(ttft_s=1.0, tpot_s=0.1, attainment=0.9), num_slots=20)
    late = []
    for _ in range(3000):
        most = bound.max_in_flight
        assert not bound.allows(1, most)  # always at the limit
        is_late = chance.random() < (most - 20) / 10
        late.append(is_late)
        finish(bound, 0.11 if is_late else 0.09, 0.06)
    assert 20 <= bound.max_in_flight <= 22
    assert 0.02 < sum(late[1000:]) / 2000 < 0.1


def test_a_light_load_teaches_nothing_of_the_limit():
    bound = SloBound(SLO(ttft_s=1.0, tpot_s=0.1), num_slots=20)
    for _ in range(10):
        finish(bound, 0.2, 0.06)
    lowered = bound.max_in_flight
    for _ in range(1000):
        finish(bound, 0.06, 0.06)
    assert bound.max_in_flight == lowered


def test_answers_that_are_late_without_waiting_do_not_close_the_door():
    """A step that is too slow, or a prompt too long: with fewer in flight they were as late."""
    bound = SloBound(SLO(ttft_s=1.0, tpot_s=0.1), num_slots=20)
    for _ in range(500):
        assert not bound.allows(1, bound.max_in_flight)
        finish(bound, 0.2, 0.2, ttft_s=9.0)
    assert bound.max_in_flight == 16


@pytest.mark.parametrize("lengths", [(10, 10), (5, 15)])
def test_five_times_the_capacity_keeps_the_goodput(lengths):
    """A small model of prefill and decode in steps of 0.1 s, 20 slots and about 20 answers/s."""
    slo = SLO(ttft_s=1.0, tpot_s=0.15)
    peak = max(goodput(slo, rate, lengths) for rate in (15, 17, 20))
    assert peak > 13
    assert goodput(slo, 100, lengths) > 0.9 * peak


def goodput(slo, rate_per_s, lengths, seconds=40.0):
    """Answers per second within the SLO, of Poisson arrivals."""
    chance, bound = random.Random(1), SloBound(slo, 20)
    prompts, ready, active = [], [], []
    num_in_flight, num_good, now, due = 0, 0, 0.0, chance.expovariate(rate_per_s)
    while now < seconds:
        now += 0.1  # one step of both engines
        for answer in prompts:
            answer["first_at"] = now
            bound.first_token(now)
        for answer in active:
            answer["left"] -= 1
        for answer in [a for a in active if a["left"] == 0]:
            active.remove(answer)
            num_in_flight -= 1
            num_gaps = answer["gaps"]
            ttft_s = answer["first_at"] - answer["came_at"]
            tpot_s = (now - answer["first_at"]) / num_gaps
            waited_s = now - answer["first_at"] - 0.1 * (num_gaps - 1)
            timeline = Timeline(ttft_s - 0.1, 0.1, 0.0, waited_s, 0.1 * num_gaps)
            bound.finished(ttft_s, tpot_s, num_gaps, timeline)
            num_good += slo.is_met(ttft_s, tpot_s)
        ready, prompts = ready + prompts, []
        while ready and len(active) < 20:
            active.append(ready.pop(0))
        while due < now:
            if bound.allows(1, num_in_flight):
                gaps = chance.randint(*lengths) - 1
                bound.began(1, due)
                prompts.append({"came_at": due, "gaps": gaps, "left": gaps + 1})
                num_in_flight += 1
            due += chance.expovariate(rate_per_s)
    return num_good / seconds
