from __future__ import annotations

import random

import pytest

from daskserve import SLO
from daskserve.server.slo_bound import SloBound


def test_a_fresh_bound_takes_a_burst_of_a_little_more_than_its_slots():
    bound = SloBound(SLO(ttft_s=1.0, tpot_s=0.1), num_slots=20)
    assert bound.allows(20, 0) and bound.allows(2, 20)
    assert not bound.allows(3, 20)


@pytest.mark.parametrize(
    ("step_s", "most"), [(0.1, 18), (0.0625, 28), (0.05, 36), (0.01, 36), (1.0, 18)]
)
def test_slack_in_tpot_becomes_a_queue(step_s, most):
    bound = SloBound(SLO(ttft_s=10.0, tpot_s=0.1), num_slots=20)
    for _ in range(200):
        bound.finished(0.1, step_s)
    assert bound.max_in_flight == most


def test_prompts_wait_only_as_many_as_get_their_token_in_time():
    """One first token each 0.1 s: eight of them fit into nine tenths of the limit."""
    bound = SloBound(SLO(ttft_s=0.9, tpot_s=0.1), num_slots=100)
    bound.began(200, 0.0)
    for number in range(1, 201):
        bound.first_token(0.5, 0.1 * number)
    assert 8 < bound.max_waiting < 8.2
    bound.began(7, 30.0)
    assert bound.allows(1, 7) and not bound.allows(2, 7)


def test_idle_time_between_prompts_does_not_count():
    bound = SloBound(SLO(ttft_s=1.0, tpot_s=0.1), num_slots=100)
    for number in range(100):
        bound.began(1, 100.0 * number)
        bound.first_token(0.2, 100.0 * number + 0.2)
    assert bound.max_waiting == pytest.approx(4.5)


def test_an_idle_server_takes_anybody():
    """Whatever was seen, else it would never learn that it has become faster."""
    bound = SloBound(SLO(ttft_s=0.001, tpot_s=0.001), num_slots=1)
    bound.began(1, 0.0)
    bound.first_token(50.0, 50.0)
    bound.finished(50.0, 50.0)
    assert bound.allows(1, 0) and not bound.allows(1, 1)


def test_those_who_leave_make_room():
    bound = SloBound(SLO(ttft_s=1.0, tpot_s=0.1), num_slots=100)
    bound.began(1, 0.0)
    bound.first_token(0.5, 0.5)
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
        bound.finished(0.11 if is_late else 0.09, 0.06)
    assert 20 <= bound.max_in_flight <= 23
    assert 0.05 < sum(late[1000:]) / 2000 < 0.2


def test_a_light_load_teaches_nothing_of_the_limit():
    bound = SloBound(SLO(ttft_s=1.0, tpot_s=0.1), num_slots=20)
    for _ in range(10):
        bound.finished(0.2, 0.06)
    lowered = bound.max_in_flight
    for _ in range(1000):
        bound.finished(0.06, 0.06)
    assert bound.max_in_flight == lowered
